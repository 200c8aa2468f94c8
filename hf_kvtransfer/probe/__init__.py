"""What a live model caches, layer by layer, learnt from one tiny forward."""

from .probe import LayerProbe, Probe, check_cache_layers, probe_model
from .recording import NUM_PROBE_TOKENS


__all__ = ["NUM_PROBE_TOKENS", "LayerProbe", "Probe", "check_cache_layers", "probe_model"]

"""The layers that the target runs itself."""

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap


class NativeLayer(LayerMap):
    """Stands in a mapper for one of the target's first layers: no map, nothing saved, nothing read of the source."""

    spec_fields = ()
    source_layers = ()

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "NativeLayer":
        """The placeholder of `{"kind": "native"}`."""
        return cls()

"""What a model caches, from its config alone: no weights, whatever its size."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from .compat import read_into_cache, unwrap
from .errors import UnsupportedModelError
from .geometry import KVGeometry, LayerGeometry
from .probe import NUM_PROBE_TOKENS, check_cache_layers
from .rotary import Rotary


# Of the random layers that a rotary embedding is tried on: 1.2 GB in float32, and some seconds.
_MOST_TRIED_PARAMETERS = 300_000_000


@dataclass(frozen=True)
class ModelOutline:
    """
    What can be said of a model before its weights are there.

    Args:
        model_class (`str`):
            Its class in transformers.
        geometry ([`KVGeometry`]):
            What it caches.
        positions (`str`):
            For people, what kind of position embedding the config asks for.
        is_rotary_checked (`bool`):
            Whether it was tried on random layers that a rotary embedding can be taken off keys. If not, that shows
            when the weights are there.
        max_positions (`int`, *optional*):
            Tokens that it can read, if the config says so.
        rotary_limit (`int`, *optional*):
            Positions from which on its rotary embedding depends on the length of a call, which cannot be translated.
        num_parameters (`int`):
            Of the whole model.
        hidden_size (`int`), vocab_size (`int`):
            Width and number of its token embeddings.
    """

    model_class: str
    geometry: KVGeometry
    positions: str
    is_rotary_checked: bool
    max_positions: int | None
    rotary_limit: int | None
    num_parameters: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ModelOutline":
        """
        Runs 8 tokens through a model without storage (PyTorch's `meta` device), and through random layers of it, one
        of each type, if they are not too large.

        Args:
            config (`PreTrainedConfig`):
                Of a causal language model.

        Raises:
            [`UnsupportedModelError`]: a layer keeps a state that is not keys and values token by token, its keys
                cannot be made position-free, or the config is of no causal language model.
        """
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"A model of type {config.model_type!r} is an encoder-decoder: only decoder-only models are supported."
            )
        try:
            with torch.device("meta"):
                model = _make(config, torch.bfloat16)  # products of experts have no other kernel without storage
        except ValueError as error:
            raise UnsupportedModelError(
                f"transformers knows no causal language model of type {config.model_type!r}, and only those have a "
                "cache that can be translated."
            ) from error
        model_class = type(model).__name__
        cache = _Recorder(config=model.config)
        check_cache_layers(cache, model_class)
        if getattr(config.get_text_config(), "kv_lora_rank", None):
            raise UnsupportedModelError(
                f"{model_class} caches one compressed state for keys and values (multi-head latent attention), which "
                "cannot be translated. Re-prefill this model."
            )
        for module in model.modules():
            # In some versions of transformers they compare positions with a limit, and on `meta` there are none.
            if (rope_type := getattr(module, "rope_type", None)) is not None:
                default = dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"
                module.rope_type = default  # type: ignore[assignment]
        try:
            read_into_cache(model, cache, torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long))
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{model_class} cannot be looked at without its weights ({error}). Load the model itself."
            ) from error
        if not cache.shapes:
            raise UnsupportedModelError(f"{model_class} caches nothing: it is no decoder. Re-prefill this model.")
        layers = [
            LayerGeometry(*cache.shapes[i], getattr(layer, "sliding_window", None)) if i in cache.shapes else None
            for i, layer in enumerate(cache.layers)
        ]
        return cls._of(model, KVGeometry(tuple(layers)), _try_rotary(config))

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "ModelOutline":
        """
        The same of a live model, on which everything is checked.

        Raises:
            [`UnsupportedModelError`]: as [`ModelOutline.from_config`].
        """
        return cls._of(model, KVGeometry.from_model(model), Rotary.from_model(model))

    @classmethod
    def _of(cls, model: PreTrainedModel, geometry: KVGeometry, rotary: Rotary | None) -> "ModelOutline":
        text_config = model.config.get_text_config()
        embeddings: Any = model.get_input_embeddings()
        positions, limit = _describe_positions(text_config)
        if rotary is not None and not rotary.calls:
            positions, limit = "no rotary embedding", None
        return cls(
            type(unwrap(model)).__name__,
            geometry,
            positions,
            rotary is not None,
            getattr(text_config, "max_position_embeddings", None),
            limit,
            sum(parameter.numel() for parameter in model.parameters()),
            embeddings.embedding_dim,
            embeddings.num_embeddings,
        )


class _Recorder(DynamicCache):
    """A cache that keeps the shapes of what it is given: heads, key width, value width."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _make(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def _try_rotary(config: PreTrainedConfig) -> Rotary | None:
    """The rotary embedding of random layers, one of each type; `None` where none can be made small enough."""
    small = copy.deepcopy(config)
    text_config = small.get_text_config()
    number = text_config.num_hidden_layers
    types = getattr(text_config, "layer_types", None) or [None] * number
    kept = [types.index(kind) for kind in dict.fromkeys(types)]
    for name, value in list(vars(text_config).items()):
        if isinstance(value, list | tuple) and len(value) == number:  # whatever else is said layer by layer
            setattr(text_config, name, [value[i] for i in kept])
    changes = {"num_hidden_layers": len(kept), "vocab_size": 64, "intermediate_size": 64, "n_inner": 64}
    changes |= {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
    changes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None)
    for name, value in changes.items():
        if hasattr(text_config, name):
            setattr(text_config, name, value)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _make(small, torch.float32).parameters())
        if size > _MOST_TRIED_PARAMETERS:
            return None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Rotary.from_model(_make(small, torch.float32))
    except UnsupportedModelError:
        raise
    except Exception:  # a config that cannot be cut down: of any kind, and nothing is known then
        return None


def _describe_positions(text_config: PreTrainedConfig) -> tuple[str, int | None]:
    """What the config says about the rotary embedding, and where it begins to depend on the length of a call."""
    kinds, limit = [], None
    for parameters in _rope_parameters(getattr(text_config, "rope_parameters", None) or {}):
        kind = parameters.get("rope_type", "default")
        details = [f"theta {parameters['rope_theta']:g}"] if "rope_theta" in parameters else []
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            details.append(f"{parameters['partial_rotary_factor']:.0%} of a head")
        if parameters.get("factor"):
            details.append(f"stretched {parameters['factor']:g}-fold")
        if "dynamic" in kind or kind == "longrope":
            limit = (
                parameters.get("original_max_position_embeddings")
                or getattr(text_config, "original_max_position_embeddings", None)
                or text_config.max_position_embeddings
            )
        kinds.append(f"{kind} rotary embedding" + (f" ({', '.join(details)})" if details else ""))
    return " and ".join(dict.fromkeys(kinds)) or "position embedding of its own", limit


def _rope_parameters(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One dict for each type of layer; most models have one for all."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or ([parameters] if parameters else [])

"""A model's attention written out, so that what it weighs and what it puts out can be listened to. Internal."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from ..compat import read_into_cache, unwrap
from ..errors import UnsupportedModelError
from ..offloading import ForwardEnded, unchanged_offloading
from ..probe import probe_model


# For `set_attn_implementation`. Models that are not listened to may have it too, and compute as ever.
IMPLEMENTATION = "hf_kvtransfer_written_out"

# Of the centred logits, in either implementation: rounding in bfloat16 makes a tenth of this.
MAX_DEVIATION = 0.1
_NUM_CHECKED_TOKENS = 48

# Module, weights and output of a call. Of this thread: another one may run a model at the same time.
_LISTENER: ContextVar[Callable[[nn.Module, torch.Tensor, torch.Tensor], None] | None] = ContextVar(
    "listener", default=None
)

# Layer, weights `[batch, heads, queries, keys]` in float32, and readout `[batch, queries, heads, value_head_dim]`.
Hear = Callable[[int, torch.Tensor, torch.Tensor], None]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Softmax attention for transformers' `AttentionInterface`.

    Args:
        module (`nn.Module`):
            The attention that calls.
        query (`torch.Tensor`):
            `[batch, heads, queries, head_dim]`.
        key (`torch.Tensor`), value (`torch.Tensor`):
            `[batch, kv_heads, keys, head_dim]`.
        attention_mask (`torch.Tensor`, *optional*):
            `[batch, 1, queries, keys]`, is added to the scores.
        scaling (`float`, *optional*):
            Of the scores, by default `head_dim**-0.5`.
        softcap (`float`, *optional*):
            What the scores are kept below, by a tanh (Gemma 2).
        s_aux (`torch.Tensor`, *optional*):
            `[heads]`, a score of each head that takes weight and reads nothing (GPT-OSS).

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Readouts `[batch, queries, heads, value_head_dim]`, and weights
        `[batch, heads, queries, keys]`.
    """
    kv_heads = key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query.unflatten(1, (kv_heads, -1)) @ key[:, :, None].mT * scaling).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.float().softmax(-1)[..., : key.shape[2]]
    output = weights.to(value.dtype).unflatten(1, (kv_heads, -1)) @ value[:, :, None]
    output = output.flatten(1, 2).transpose(1, 2).contiguous()
    listener = _LISTENER.get()
    if listener is not None:
        listener(module, weights, output)
    return output, weights


class WrittenOutAttention:
    """
    While it is entered, a model's attention is computed by [`attend`] and can be listened to.

    Args:
        model (`PreTrainedModel`):
            A model in eval mode.

    Raises:
        `UnsupportedModelError`: when it is entered: the model does not take another attention function, or its own one
            does more than softmax attention.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = unwrap(model)
        self._layers = {
            self._model.get_submodule(layer.attention): i
            for i, layer in enumerate(probe_model(model).layers)
            if layer is not None
        }

    def __enter__(self) -> "WrittenOutAttention":
        AttentionInterface.register(IMPLEMENTATION, attend)
        AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)  # scores take a mask that is added
        config = self._model.config
        parts = {"": config} | {name: getattr(config, name) for name in config.sub_configs}
        self._before = {name: part._attn_implementation for name, part in parts.items() if part is not None}
        expected = self._read_probe()
        try:
            self._model.set_attn_implementation(IMPLEMENTATION)
            heard: set[int] = set()
            with self.listen(lambda i, weights, output: heard.add(i), self._layers.values()):
                found = self._read_probe()
            deviation = ((found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm()).item()
            # Not `>`: also where it is NaN.
            if len(heard) < len(self._layers) or not deviation <= MAX_DEVIATION:
                raise UnsupportedModelError(
                    f"The attention of {type(self._model).__name__} cannot be written out: "
                    f"{len(heard)} of {len(self._layers)} layers call transformers' AttentionInterface, and the "
                    f"logits come out {deviation:.0%} away. Its readouts cannot be calibrated."
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._model.set_attn_implementation(self._before)

    def _read_probe(self) -> torch.Tensor:
        """Logits on a few tokens, whatever they are."""
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        token_ids = torch.arange(3, 3 + _NUM_CHECKED_TOKENS)[None] % vocabulary
        logits = read_into_cache(self._model, DynamicCache(), token_ids, num_logits=8)
        assert logits is not None
        return logits

    @contextmanager
    def listen(self, hear: Hear, layers: Collection[int], stop_behind: int | None = None) -> Iterator[None]:
        """
        Hear what some layers compute in this context, in this thread.

        Args:
            hear (`Callable`):
                Is called with the layer, its weights `[batch, heads, queries, keys]` in float32 and its readouts
                `[batch, queries, heads, value_head_dim]`.
            layers (`Collection[int]`):
                The layers.
            stop_behind (`int`, *optional*):
                A layer, after whose attention whatever runs in this context is ended.
        """

        def listener(module, weights, output):
            layer_idx = self._layers.get(module)
            if layer_idx in layers:
                hear(layer_idx, weights, output)
            if layer_idx is not None and layer_idx == stop_behind:
                raise ForwardEnded

        token = _LISTENER.set(listener)
        try:
            with unchanged_offloading(self._model):
                yield
        except ForwardEnded:
            pass
        finally:
            _LISTENER.reset(token)

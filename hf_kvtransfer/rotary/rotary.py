"""Remove and apply rotary embeddings through the model's own rotary module, never through a copy of its formula."""

import weakref
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..probe import Probe, probe_model
from ..probe.rotary_call import RotaryCall
from .first_positions import FirstPositions, are_first
from .layout import Columns, LayerRotary, compact, detect, turn


# To put a position on, to take it off, and what gradients take back through the former.
Direction = Literal["apply", "remove", "transpose"]

# Scalars of keys that are rotated at a time on a CPU.
_CPU_BLOCK = 2**19

_ROTARIES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Rotary:
    """The rotary embedding of a model, at any positions. Made by [`~Rotary.from_model`].

    Args:
        model_class (`str`):
            For error messages.
        layers (`tuple`):
            One [`LayerRotary`] for each layer of the cache, `None` where the layer caches nothing of its own.
        calls (`tuple`):
            The distinct calls of the model's rotary module, one for most models, one for each layer type for some.
    """

    def __init__(self, model_class: str, layers: tuple[LayerRotary | None, ...], calls: tuple[RotaryCall, ...]):
        self.model_class = model_class
        self.layers = layers
        self.calls = calls
        self._first_positions: dict[tuple[int, Columns], FirstPositions] = {}
        self._limits = [limit for limit in map(_length_limit, calls) if limit is not None]

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "Rotary":
        """Finds out how each layer rotates its keys, and checks it on keys that the model itself has made.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                A live model. The first time, it runs on 8 tokens.

        Returns:
            [`Rotary`]: its rotary embedding.

        Raises:
            [`UnsupportedModelError`]: if the rotary embedding of a layer cannot be removed and applied again.
        """
        probe = probe_model(model)
        if probe not in _ROTARIES:
            _ROTARIES[probe] = cls._from_probe(probe)
        return _ROTARIES[probe]

    @classmethod
    def _from_probe(cls, probe: Probe) -> "Rotary":
        calls: list[RotaryCall] = []
        layers: list[LayerRotary | None] = []
        for layer_idx, layer in enumerate(probe.layers):
            if layer is None:
                layers.append(None)
                continue
            call_idx = None
            if layer.rotary_call is not None:
                # Layers of one type were given one and the same call, so its table is computed once for them all.
                if layer.rotary_call not in calls:
                    calls.append(layer.rotary_call)
                call_idx = calls.index(layer.rotary_call)
            layers.append(detect(layer, layer_idx, call_idx, layers, probe.model_class))
        return cls(probe.model_class, tuple(layers), tuple(calls))

    def at(self, position_ids: torch.Tensor) -> "RotaryTables":
        """
        Args:
            position_ids (`torch.Tensor` of shape `[batch, tokens]`):
                The positions. A batch of 1 serves keys of any batch size.

        Returns:
            [`RotaryTables`]: the rotary embedding at these positions. Nothing is computed until it is used.

        Raises:
            [`UnsupportedModelError`]: as [`~Rotary.check_length`].
        """
        if position_ids.ndim != 2:
            raise ValueError(f"`position_ids` must be [batch, tokens], not of shape {list(position_ids.shape)}.")
        # Only models with a limit pay for reading the positions back from their device.
        if self._limits and position_ids.numel() > 0:
            self.check_length(int(position_ids.max()) + 1)
        return RotaryTables(self, position_ids)

    def cos_and_sin(
        self, call_idx: int, columns: Columns, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            call_idx (`int`), columns (`str`):
                As of a [`LayerRotary`].
            position_ids (`torch.Tensor` of shape `[batch, tokens]`):
                The positions.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: cos and sin, one column for each frequency, in float32, to be read
            only.
        """
        call = self.calls[call_idx]
        if not self.depends_on_length:
            first = self._first_positions.setdefault((call_idx, columns), FirstPositions(call, columns))
            known = first.at(position_ids)
            if known is not None:
                return known
        cos, sin = call(position_ids)
        return compact(cos, columns), compact(sin, columns)

    def keeps(self, position_ids: torch.Tensor) -> bool:
        """Whether cos and sin at these positions are kept, on a CPU, so that they take no room of each request."""
        return not self.depends_on_length and are_first(position_ids)

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies change with the length of a call, at lengths that [`~Rotary.check_length`] refuses."""
        return bool(self._limits)

    def check_length(self, num_positions: int) -> None:
        """Refuses lengths at which the embedding of a token depends on how many tokens the call was made with.

        Args:
            num_positions (`int`):
                The highest position plus one.

        Raises:
            [`UnsupportedModelError`]: for `dynamic` and `longrope` embeddings beyond their original length.
        """
        for rope_type, original_length in self._limits:
            if num_positions > original_length:
                raise UnsupportedModelError(
                    f"{self.model_class} has a `{rope_type}` rotary embedding, which beyond its original "
                    f"{original_length} positions depends on the length of each call: keys cached by different calls "
                    f"do not fit together, and {num_positions} positions are asked for. Re-prefill, or stay within "
                    f"{original_length} positions."
                )


class RotaryTables:
    """The rotary embedding of a model at given positions. Made by [`~Rotary.at`].

    Arithmetic is in float32, with cos and sin rounded to the model's dtype, as the model itself rounds them.

    Args:
        rotary ([`Rotary`]):
            The rotary embedding.
        position_ids (`torch.Tensor` of shape `[batch, tokens]`):
            The positions.
    """

    def __init__(self, rotary: Rotary, position_ids: torch.Tensor):
        self.rotary = rotary
        self.position_ids = position_ids
        self._tables: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, layer_idx: int, device: torch.device) -> None:
        """
        Compute cos and sin for a layer's keys, which takes a multiple of their memory, before they are needed, and let
        go of those for layers that rotate otherwise.
        """
        layer = self.rotary.layers[layer_idx]
        if layer is not None and layer.layout != "none":
            for key in list(self._tables):
                if key[:2] != (layer.call_idx, layer.columns):
                    self._tables.pop(key, None)
            self._table(layer, device, "apply")

    @torch.no_grad()
    def remove(self, key_states: torch.Tensor, layer_idx: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Turns keys as cached into keys without a position.

        Args:
            key_states (`torch.Tensor` of shape `[batch, heads, tokens, head_dim]`):
                Keys as the model caches them at these positions, of any strides.
            layer_idx (`int`):
                The layer that they are of.
            out (`torch.Tensor`, *optional*):
                Where to write the result, of the same shape and of any dtype and strides. May be `key_states`.

        Returns:
            `torch.Tensor`: `out` if given, `key_states` itself if the layer does not rotate, or else a new tensor.

        Raises:
            `ValueError`: if the layer caches nothing of its own, or the number of tokens is another.
        """
        return self._rotate(key_states, layer_idx, 0, None, out, "remove")

    @torch.no_grad()
    def apply(
        self,
        key_states: torch.Tensor,
        layer_idx: int,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Turns keys without a position into keys as the model would cache them.

        Args:
            key_states (`torch.Tensor` of shape `[batch, heads, tokens, head_dim]`):
                Keys without rotary embedding, of any strides.
            layer_idx (`int`):
                The layer that they are of.
            start (`int`, *optional*, defaults to 0):
                The index in `position_ids` of the first token.
            stop (`int`, *optional*):
                The index in `position_ids` after the last token. Defaults to all.
            out (`torch.Tensor`, *optional*):
                Where to write the result, of the same shape and of any dtype and strides. May be `key_states`.

        Returns:
            `torch.Tensor`: `out` if given, `key_states` itself if the layer does not rotate, or else a new tensor.

        Raises:
            `ValueError`: if the layer caches nothing of its own, or the number of tokens is another.
        """
        return self._rotate(key_states, layer_idx, start, stop, out, "apply")

    def apply_with_grad(
        self, key_states: torch.Tensor, layer_idx: int, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """As [`~RotaryTables.apply`], and gradients flow back to `key_states`."""
        rotated: torch.Tensor = _Rotation.apply(key_states, self, layer_idx, start, stop)
        return rotated

    def _rotate(
        self,
        key_states: torch.Tensor,
        layer_idx: int,
        start: int,
        stop: int | None,
        out: torch.Tensor | None,
        direction: Direction,
    ) -> torch.Tensor:
        layer = self.rotary.layers[layer_idx]
        if layer is None:
            raise ValueError(f"Layer {layer_idx} of {self.rotary.model_class} caches no keys of its own.")
        # A table of one token would broadcast silently.
        num_tokens = len(range(self.position_ids.shape[1])[start:stop])
        if key_states.shape[2] != num_tokens:
            raise ValueError(f"Keys of {key_states.shape[2]} tokens were given with {num_tokens} position ids.")
        if layer.layout == "none":
            return key_states if out is None else out.copy_(key_states)
        cos, sin = self._table(layer, key_states.device, direction)
        cos, sin = cos[:, start:stop], sin[:, start:stop]
        out = torch.empty_like(key_states) if out is None else out
        step = max(num_tokens, 1)
        if key_states.device.type == "cpu":
            # Twice as fast: temporaries stay in the processor's cache. On a GPU it would only be more launches.
            step = max(1, _CPU_BLOCK // max(1, key_states[:, :, :1].numel()))
        for i in range(0, num_tokens, step):
            block = slice(i, i + step)
            turn(key_states[:, :, block], cos[:, block], sin[:, block], layer, out[:, :, block])
        return out

    def _table(
        self, layer: LayerRotary, device: torch.device, direction: Direction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer.call_idx is not None
        key = (layer.call_idx, layer.columns, direction, device)
        table = self._tables.get(key)  # another thread may let go of it any time
        if table is None:
            if direction == "transpose":
                cos, sin = self._table(layer, device, "apply")
                table = (cos, -sin)
            elif direction == "remove":
                cos, sin = self._table(layer, device, "apply")
                # Turns back, and undoes what yarn and longrope multiply cos and sin with.
                scale = cos.square().addcmul_(sin, sin)
                table = (cos / scale, -sin / scale)
            else:
                source = (layer.call_idx, layer.columns)
                made = self._tables.get(source)
                if made is None:
                    made = self._tables[source] = self.rotary.cos_and_sin(*source, self.position_ids)
                table = (made[0].to(device), made[1].to(device))
            self._tables[key] = table
        return table


class _Rotation(torch.autograd.Function):
    """[`RotaryTables.apply`]: linear, so the gradient is turned by the transpose."""

    @staticmethod
    def forward(ctx, key_states, tables, layer_idx, start, stop):
        ctx.arguments = tables, layer_idx, start, stop
        return tables.apply(key_states, layer_idx, start, stop, out=torch.empty_like(key_states))

    @staticmethod
    def backward(ctx, *gradients):
        tables, layer_idx, start, stop = ctx.arguments
        gradient = tables._rotate(gradients[0], layer_idx, start, stop, None, "transpose")
        return gradient, None, None, None, None


def _length_limit(call: RotaryCall) -> tuple[str, int] | None:
    """The rope type and original length of a rotary module whose frequencies depend on the length of the call."""
    rope_type: Any = getattr(call.module, "rope_type", None)
    rope_parameters = getattr(getattr(call.module, "config", None), "rope_parameters", None) or {}
    if isinstance(rope_type, dict):
        rope_type = rope_type.get(call.layer_type)
        rope_parameters = rope_parameters.get(call.layer_type) or {}
    if rope_type == "longrope" and "original_max_position_embeddings" in rope_parameters:
        return rope_type, rope_parameters["original_max_position_embeddings"]
    if rope_type is not None and (rope_type == "longrope" or "dynamic" in rope_type):
        return rope_type, int(call.module.original_max_seq_len)  # type: ignore[arg-type]
    return None

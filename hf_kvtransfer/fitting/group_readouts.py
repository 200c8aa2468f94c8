"""A group of layers listened to while the target continues texts: on its own cache, and on translations."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..errors import CalibrationError, UnsupportedModelError
from ..geometry import LayerGeometry
from ..maps.linear import at_tokens
from .continuations import Continuations, ReadText
from .readout_sums import Correction, HeadSums, value_heads
from .written_out_attention import WrittenOutAttention


class GroupReadouts:
    """
    Sums over the readouts of a group of layers, on the target's own cache and on translations.

    Args:
        reader (`Continuations`):
            Lets the target continue.
        attention (`WrittenOutAttention`):
            Of the target.
        layers (`Mapping[int, LayerGeometry]`):
            The group.
    """

    def __init__(self, reader: Continuations, attention: WrittenOutAttention, layers: Mapping[int, LayerGeometry]):
        self._reader, self._attention, self._layers = reader, attention, layers
        self._heads = {i: value_heads(reader.mapper.layers[i], layer) for i, layer in layers.items()}
        self._sums: dict[int, list[HeadSums]] = {}

    def add(self, text: str | torch.Tensor, starts: torch.Tensor, held_out: bool) -> None:
        """Let both models read a text, the target continue it at some places, and take in what it reads out there."""
        steps = starts[:, None] + torch.arange(self._reader.length)
        native: dict[int, torch.Tensor] = {}

        def hear_native(layer_idx, weights, output):
            native[layer_idx] = output[0, steps.to(output.device)]

        with self._attention.listen(hear_native, self._layers):
            read = self._reader.read(text, starts)

        features: dict[int, torch.Tensor] = {}

        def hear_mapped(layer_idx, weights, output):
            if not torch.isfinite(output).all():
                raise CalibrationError(
                    f"The readouts of target layer {layer_idx} hold NaN or Inf, in a text that begins with "
                    f"{text[:60]!r}. Load both models in float32 or bfloat16."
                )
            self._add_layer(layer_idx, read, weights, output, native[layer_idx], features.pop(layer_idx), held_out)

        hooks = [self._reader.mapper.layers[i].register_forward_pre_hook(_keeper(features, i)) for i in self._layers]
        try:
            with self._attention.listen(hear_mapped, self._layers, stop_behind=max(self._layers)):
                self._reader.predict(read)
        finally:
            for hook in hooks:
                hook.remove()

    def _add_layer(
        self,
        layer_idx: int,
        read: ReadText,
        weights: torch.Tensor,
        output: torch.Tensor,
        native: torch.Tensor,
        features: torch.Tensor,
        held_out: bool,
    ) -> None:
        """
        Args:
            layer_idx (`int`):
                The target layer.
            read (`ReadText`):
                The text.
            weights (`torch.Tensor`):
                `[rows, heads, queries, keys]`. A row's keys end with its context, then the continuation's own.
            output (`torch.Tensor`), native (`torch.Tensor`):
                `[rows, queries, heads, value_head_dim]`, on the translation and on the target's own cache.
            features (`torch.Tensor`):
                `[tokens, features]`, of the mapped tokens before the last continuation.
            held_out (`bool`):
                Whether the text is held out.
        """
        layer = self._layers[layer_idx]
        if weights.shape[1] % layer.num_key_value_heads or output.shape[-1] != layer.value_head_dim:
            raise UnsupportedModelError(
                f"Layer {layer_idx} of the target caches {layer.num_key_value_heads} heads of values of width "
                f"{layer.value_head_dim}, but its attention reads out {weights.shape[1]} heads of {output.shape[-1]}: "
                "it is not a mean of cached values, and cannot be calibrated."
            )
        context, num_mapped = weights.shape[-1] - self._reader.length, len(features)
        # What stands before the mapped tokens are the sinks.
        counts = [start - (int(read.starts[-1]) - num_mapped) for start in read.starts.tolist()]
        native, output = (part.float().transpose(1, 2) for part in (native, output))
        by_head = (
            part.unflatten(1, (layer.num_key_value_heads, -1)).unbind(1)
            for part in (weights[..., :context], native - output, native)
        )
        features = features.float()
        for j, (attention, residual, wanted) in enumerate(zip(*by_head, strict=True)):
            of_head = features[:, self._heads[layer_idx][j].columns]
            sums = self._sums.setdefault(layer_idx, [])
            if len(sums) == j:  # in the units of the first text: any that are about right will do
                scale = of_head.std(0, correction=0)
                sums.append(HeadSums(of_head.mean(0), torch.where(scale > 0, scale, torch.ones_like(scale))))
            sums[j].add(
                [row[..., context - count :] for row, count in zip(attention, counts, strict=True)],
                [of_head[:count] for count in counts],
                residual,
                wanted,
                held_out,
            )

    def solve(self, strengths: Sequence[float]) -> dict[int, list[Correction]]:
        """For each layer how its value heads are to be changed."""
        return {
            i: [
                of_head.solve(head, strengths)
                for of_head, head in zip(
                    sums, value_heads(self._reader.mapper.layers[i], self._layers[i]), strict=True
                )
            ]
            for i, sums in self._sums.items()
        }


def _keeper(features: dict[int, torch.Tensor], layer_idx: int) -> Callable[[nn.Module, tuple], None]:
    """A hook that keeps what a layer map is called with, at the target's tokens, `[tokens, features]`."""

    def keep(layer_map: nn.Module, args: tuple) -> None:
        source_features, token_features, source_index = args
        states = torch.cat(source_features, -1)
        if source_index is not None:
            states = at_tokens(states, source_index)
        features[layer_idx] = (states if token_features is None else torch.cat([states, token_features], -1))[0]

    return keep

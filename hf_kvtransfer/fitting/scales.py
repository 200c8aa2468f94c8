"""How large features are, and what layer maps make of them, inside and at their ends, measured on a few texts."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ..maps.head_matched import HeadMatchedMap
from ..maps.identity import IdentityMap
from ..maps.residual_mlp import ResidualMLPMap
from .columns import key_value_columns
from .continuations import Continuations, ReadText
from .inputs import Inputs
from .moments import Moments
from .states import token_blocks


# Of the largest scale of a block: what hardly varies is not blown up.
_SMALLEST = 1e-3


class Scales:
    """
    Mean and standard deviation of each feature, of each output of each layer map, and of its waist.

    Args:
        reader (`Continuations`):
            Has the mapper.
        texts (`Sequence[ReadText]`):
            What it has read. The target goes on in each once.
    """

    @torch.no_grad()
    def __init__(self, reader: Continuations, texts: Sequence[ReadText]):
        self._mapper, self._geometry = reader.mapper, reader.mapper.source_geometry
        names: list = [("source", i) for i, layer in enumerate(self._geometry.layers) if layer is not None]
        self._tokens = token_blocks(self._mapper.config.previous_tokens) if self._mapper.config.token_features else []
        names += self._tokens
        self._features = Moments((name, name) for name in names)
        self._outputs: dict[int, Moments] = {}
        self._waists: dict[int, Moments] = {}
        with ExitStack() as stack:
            for i, layer_map in enumerate(self._mapper.layers):
                hook = layer_map.register_forward_hook(partial(self._note, i))
                stack.callback(hook.remove)
            for text in texts:
                rows = self._rows(text)
                self._features.add(rows)
                self._note_waists(rows)
                reader.predict(text)

    def _rows(self, text: ReadText) -> dict:
        index = torch.arange(len(text.input_ids)) if text.source_index is None else text.source_index[0]
        sinks = self._mapper.config.sink_tokens
        states = text.source_kv.features
        rows: dict = {("source", i): part[0, index[sinks:]] for i, part in enumerate(states) if part is not None}
        if text.token_features is not None:
            blocks = text.token_features[0, sinks:].split(self._mapper.config.token_features, -1)
            rows |= dict(zip(self._tokens, blocks, strict=True))
        return rows

    def _note_waists(self, rows: dict) -> None:
        layer_map: Any
        for i, layer_map in enumerate(self._mapper.layers):
            if hasattr(layer_map, "down"):
                down = layer_map.down
                features = torch.cat([rows[name].to(down.device) for name in self._names(layer_map)], 1)
                if isinstance(layer_map, ResidualMLPMap):  # whose features are standardised, and means do not matter
                    features = features / layer_map.feature_scale
                waist = features.to(down.dtype) @ down.T
                self._waists.setdefault(i, Moments([("waist", "waist")])).add({"waist": waist})

    def _names(self, layer_map: Any) -> list:
        """Of the blocks of features that a layer map reads."""
        reads_tokens = not isinstance(layer_map, IdentityMap) and bool(self._mapper.config.token_features)
        return Inputs(layer_map.source_layers, layer_map.previous_tokens).blocks(reads_tokens)

    def _note(self, layer_idx: int, layer_map: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        self._outputs.setdefault(layer_idx, Moments([("output", "output")])).add({"output": output.flatten(0, 1)})

    def outputs(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of what a layer's map puts out, `[out_features]`, on the CPU."""
        moments = self._outputs[layer_idx]
        return moments.mean(["output"]).float(), _scale(moments, "output")

    def waist(self, layer_idx: int) -> torch.Tensor | None:
        """Standard deviation of a layer map's waist, `[waist]`, on the CPU; `None` if it has none."""
        return _scale(self._waists[layer_idx], "waist") if layer_idx in self._waists else None

    def features(self, layer_map: Any) -> torch.Tensor:
        """Standard deviation of the features that a layer map reads, `[in_features]`, or `[heads, in_features]`."""
        scales = [_scale(self._features, name) for name in self._names(layer_map)]
        if not isinstance(layer_map, HeadMatchedMap):
            return torch.cat(scales)
        rows = []
        for head in range(len(layer_map.weight)):
            own = [
                scale[torch.cat(key_value_columns(self._geometry.layers[i], heads[head]))]
                for i, heads, scale in zip(layer_map.source_layers, layer_map.source_heads, scales, strict=False)
            ]
            rows.append(torch.cat([*own, *scales[len(own) :]]))
        return torch.stack(rows)


def _scale(moments: Moments, name: Any) -> torch.Tensor:
    scale = moments.variance([name]).sqrt().float()
    return scale.clamp(min=max(_SMALLEST * scale.max().item(), torch.finfo(torch.float32).tiny))

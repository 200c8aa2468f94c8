"""The parameters of a mapper while it is trained."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CalibrationError
from ..geometry import LayerGeometry
from ..maps.head_matched import HeadMatchedMap
from ..maps.residual_mlp import ResidualMLPMap
from ..maps.storage import matrices
from .continuations import Continuations, ReadText
from .output_correction import OutputCorrection, can_be_corrected
from .scales import Scales
from .weight_step import take_steps, train_in_steps


# Learning rates relative to that of scales and shifts: the more parameters move one output together, the smaller.
MIX_RATE, WEIGHT_RATE = 0.1, 15.0


class TrainedMaps:
    """
    Puts [`OutputCorrection`]s around the maps of a mapper, and [`WeightStep`]s into them.

    Args:
        reader (`Continuations`):
            Has the mapper, whose weights are plain. It is changed until [`TrainedMaps.finish`].
        texts (`Sequence[ReadText]`):
            Texts on which the scales of features and outputs are measured.
        train_weights (`bool`):
            Whether all weights are trained.

    Raises:
        `CalibrationError`: the mapper has no weights.
    """

    def __init__(self, reader: Continuations, texts: Sequence[ReadText], train_weights: bool):
        self._layers = reader.mapper.layers
        scales = Scales(reader, texts)
        self._gains: list[nn.Parameter] = []
        self._mixes: list[nn.Parameter] = []
        self._steps: list[nn.Parameter] = []
        layer_map: Any
        for i, layer_map in enumerate(self._layers):
            if not any(True for _ in matrices(layer_map)):
                continue
            layer = reader.geometry.layers[i]
            assert layer is not None
            device = next(layer_map.parameters()).device
            mean, scale = (part.to(device) for part in scales.outputs(i))
            corrected = can_be_corrected(layer_map)
            if train_weights or not corrected or isinstance(layer_map, ResidualMLPMap):
                outputs = _by_head(scale, layer) if isinstance(layer_map, HeadMatchedMap) else scale
                waist = scales.waist(i)
                self._steps += train_in_steps(
                    layer_map,
                    scales.features(layer_map).to(device),
                    outputs,
                    None if waist is None else waist.to(device),
                )
            if corrected:
                correction: Any = OutputCorrection(layer_map, layer, mean, scale)
                self._layers[i] = correction
                self._gains += [correction.gain, correction.shift]
                self._mixes += [correction.mix_keys, correction.mix_values]
        if not self.parameters:
            raise CalibrationError(
                f"Mapper {reader.mapper.name} has no weights to train: it is an identity in every layer."
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [*self._gains, *self._mixes, *self._steps]

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """For an optimizer, each with its learning rate."""
        parts = ((self._gains, 1.0), (self._mixes, MIX_RATE), (self._steps, WEIGHT_RATE))
        return [{"params": part, "lr": learning_rate * rate} for part, rate in parts if part]

    def finish(self) -> None:
        """Fold everything into the maps' plain weights."""
        for i, layer_map in enumerate(self._layers):
            own = layer_map.layer_map if isinstance(layer_map, OutputCorrection) else layer_map
            take_steps(own)
            own.requires_grad_(False)
            self._layers[i] = layer_map.fold() if isinstance(layer_map, OutputCorrection) else own


def _by_head(outputs: torch.Tensor, layer: LayerGeometry) -> torch.Tensor:
    """Keys of all heads, then values of all heads, as keys and values of each head, `[heads, outputs of a head]`."""
    keys, values = (part.view(layer.num_key_value_heads, -1) for part in outputs.split(layer.widths))
    return torch.cat([keys, values], 1)

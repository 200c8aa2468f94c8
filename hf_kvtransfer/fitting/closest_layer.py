"""Which source layer a target layer is a copy of, for maps that take one as it is."""

from collections.abc import Hashable, Mapping
from functools import partial

import torch

from ..errors import CalibrationError
from ..geometry import KVGeometry, LayerGeometry
from .processes import Processes


# Of no rows, the keys' part of a sum and the values'.
_NOTHING = torch.zeros(2, dtype=torch.float64)


class ClosestLayer:
    """
    Finds for each target layer the source layer whose keys and values explain most of its own as they are.

    Args:
        source ([`KVGeometry`]):
            What the source caches.
        target_layers (`Mapping[int, LayerGeometry]`):
            The target layers.

    Raises:
        `CalibrationError`: a target layer has other heads than every source layer.
    """

    def __init__(self, source: KVGeometry, target_layers: Mapping[int, LayerGeometry]):
        self.candidates: dict[int, list[int]] = {}
        for i, layer in target_layers.items():
            self.candidates[i] = [
                j
                for j, other in enumerate(source.layers)
                if other is not None
                and other.num_key_value_heads == layer.num_key_value_heads
                and (other.key_head_dim, other.value_head_dim) == (layer.key_head_dim, layer.value_head_dim)
            ]
            if not self.candidates[i]:
                raise CalibrationError(
                    f"No source layer has the heads of target layer {i}, so none can be taken as it is: the source is "
                    f"{source.describe()}, the layer {KVGeometry((layer,)).describe()}. Choose another `kind`."
                )
        self._widths = {i: layer.widths for i, layer in target_layers.items()}
        # Sums of squared differences, of keys and of values; and of the target's squares, to compare the two with.
        self._errors: dict[tuple[int, int], torch.Tensor] = {}
        self._squares: dict[int, torch.Tensor] = {}
        self._train, self._held_out = 0, 0

    def add(self, rows: Mapping[Hashable, torch.Tensor], held_out: bool) -> None:
        """Take in a batch of [`PairedStates.read`]. Nothing is fitted, so held-out rows are rows like any other."""
        for i, candidates in self.candidates.items():
            target = rows["target", i].double()
            self._squares[i] = self._squares.get(i, 0) + self._by_part(i, target)
            for j in candidates:
                difference = target - rows["source", j].double().to(target.device)
                self._errors[i, j] = self._errors.get((i, j), 0) + self._by_part(i, difference)
        count = len(next(iter(rows.values())))
        self._train, self._held_out = self._train + count * (not held_out), self._held_out + count * held_out

    def _by_part(self, target_layer: int, states: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.square().sum() for part in states.split(self._widths[target_layer], -1)]).cpu()

    @property
    def sums(self) -> dict[str, "ClosestLayer"]:
        """Everything that was taken in, for a [`Checkpoint`]."""
        return {"closest": self}

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that was summed, as named tensors: what [`ClosestLayer.load`] takes."""
        tensors = {f"error.{i}.{j}": error for (i, j), error in self._errors.items()}
        tensors |= {f"square.{i}": square for i, square in self._squares.items()}
        return tensors | {"counts": torch.tensor(self.counts)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a [`ClosestLayer.state`]."""
        self._train, self._held_out = state["counts"].tolist()
        for i, candidates in self.candidates.items():
            if self._train + self._held_out:
                self._squares[i] = state[f"square.{i}"]
                self._errors |= {(i, j): state[f"error.{i}.{j}"] for j in candidates}

    def reduce(self, processes: Processes) -> None:
        """Take in what the other processes have summed."""
        self._train, self._held_out = (int(processes.sum(torch.tensor(count))) for count in self.counts)
        for i, candidates in self.candidates.items():
            self._squares[i] = processes.sum(self._squares.get(i, _NOTHING))
            for j in candidates:
                self._errors[i, j] = processes.sum(self._errors.get((i, j), _NOTHING))

    @property
    def counts(self) -> tuple[int, int]:
        """Rows taken in to fit on, and held out."""
        return self._train, self._held_out

    def select(self) -> dict[int, list[int]]:
        """For each target layer the closest source layer."""
        return {i: [min(candidates, key=partial(self._error, i))] for i, candidates in self.candidates.items()}

    def _error(self, target_layer: int, source_layer: int) -> float:
        relative = self._errors[target_layer, source_layer] / self._squares[target_layer].clamp(min=1e-300)
        return float(relative.sum())

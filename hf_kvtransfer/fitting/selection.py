"""Which source layers a target layer should read: a cheap pass over random projections."""

from collections.abc import Hashable, Mapping, Sequence

import torch

from .moments import Moments
from .ridge import Gaussian, fit_ridge
from .states import TOKENS


# One strength is enough to rank layers.
SCREENING_STRENGTH = 1e-3


class LayerScreening:
    """
    Ranks source layers for each target layer by held-out explained variance, a layer at a time, each given the ones
    already chosen and the token features.

    Random projections of every layer's keys and values keep the sums small however wide and deep the models are: they
    preserve explained variance in expectation, and a ranking needs no more.

    Args:
        source_layers (`Sequence[int]`):
            Layers to choose from.
        token_features (`bool`):
            Whether every target layer reads the token features too.
        target_layers (`Mapping[int, tuple[int, int]]`):
            For each target layer the widths of its keys and of its values.
        seed (`int`, *optional*, defaults to 0):
            Of the projections.
        width (`int`, *optional*, defaults to 96):
            Of the projection of one layer's keys and values.
    """

    def __init__(
        self,
        source_layers: Sequence[int],
        token_features: bool,
        target_layers: Mapping[int, tuple[int, int]],
        seed: int = 0,
        width: int = 96,
    ):
        self.candidates: list[tuple[str, int]] = [("source", i) for i in source_layers]
        self.always: list[Hashable] = [TOKENS] * token_features
        self.target_layers = dict(target_layers)
        self.width = width
        self._generator = torch.Generator().manual_seed(seed)
        self._projections: dict[Hashable, torch.Tensor] = {}
        self._columns: dict[Hashable, torch.Tensor] = {}
        self._train, self._held_out = (Moments([("x", "x"), ("x", "y")]) for _ in range(2))

    def add(self, rows: Mapping[Hashable, torch.Tensor], held_out: bool) -> None:
        """Take in a batch of [`PairedStates.read`]."""
        x = {name: self._project(name, rows[name], self.width) for name in (*self.candidates, *self.always)}
        start = 0
        for name, block in x.items():
            self._columns[name] = torch.arange(start, start := start + block.shape[1])
        y = [
            self._project(("target", i, part), states, self.width // 2)
            for i, widths in self.target_layers.items()
            for part, states in enumerate(rows["target", i].split(widths, dim=1))
        ]
        (self._held_out if held_out else self._train).add({"x": torch.cat(list(x.values()), 1), "y": torch.cat(y, 1)})

    def _project(self, name: Hashable, rows: torch.Tensor, width: int) -> torch.Tensor:
        if rows.shape[1] <= width:
            return rows.float()
        if name not in self._projections:
            self._projections[name] = torch.randn(rows.shape[1], width, generator=self._generator) / width**0.5
        return rows.float() @ self._projections[name].to(rows.device)

    @property
    def counts(self) -> tuple[int, int]:
        """Rows taken in to fit on, and held out."""
        return self._train.count, self._held_out.count

    def select(self, num_layers: int) -> dict[int, list[int]]:
        """
        Args:
            num_layers (`int`):
                Source layers for each target layer.

        Returns:
            `dict[int, list[int]]`: For each target layer the chosen source layers, in the source's order.
        """
        moments = [
            (m.mean(["x"]), m.mean(["y"]), m.covariance(["x"], ["x"]), m.covariance(["x"], ["y"]), m.variance(["y"]))
            for m in (self._train, self._held_out)
        ]
        selection: dict[int, list[int]] = {}
        start = 0
        for i, widths in self.target_layers.items():
            keys, values = (min(width, self.width // 2) for width in widths)
            targets, start = slice(start, start + keys + values), start + keys + values
            groups = [slice(0, keys), slice(keys, keys + values)]
            chosen: list[tuple[str, int]] = []

            def score(candidate: Hashable, chosen=chosen, targets=targets, groups=groups) -> float:
                columns = torch.cat([self._columns[name] for name in (*self.always, *chosen, candidate)])
                train, held_out = (
                    Gaussian(mx[columns], my[targets], xx[columns][:, columns], xy[columns][:, targets], vy[targets])
                    for mx, my, xx, xy, vy in moments
                )
                return sum(fit_ridge(train, held_out, groups, [SCREENING_STRENGTH]).explained_variance)

            for _ in range(num_layers):
                chosen.append(max((name for name in self.candidates if name not in chosen), key=score))
            selection[i] = sorted(layer_idx for _, layer_idx in chosen)
        return selection

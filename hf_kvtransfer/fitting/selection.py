"""Which source layers, and tokens, a target layer should read: a cheap pass over random projections."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from ..geometry import KVGeometry, LayerGeometry
from .columns import key_value_columns
from .forward_selection import Correlations, ForwardSelection
from .inputs import Inputs
from .moments import Moments
from .processes import Processes
from .ridge import Gaussian
from .states import token_blocks


# A head's projection is not narrower than this, however many heads share the width of a layer.
LEAST_WIDTH = 24


@dataclasses.dataclass(frozen=True)
class Step:
    """
    What a target layer would read next: one more source layer, or one more token before.

    Args:
        inputs ([`Inputs`]):
            What it reads then.
        gain (`float`):
            Held-out explained variance that this adds: of the keys plus of the values, each times its importance.
        cost (`float`):
            What it costs beyond what was read before.
    """

    inputs: Inputs
    gain: float
    cost: float


class LayerScreening:
    """
    Ranks source layers for each target layer by held-out explained variance, each given the ones before it and the
    token features.

    Random projections of every layer's keys and values keep the sums small however wide and deep the models are: they
    preserve explained variance in expectation, and a ranking needs no more.

    Args:
        source ([`KVGeometry`]):
            What the source caches.
        target_layers (`Mapping[int, LayerGeometry]`):
            The target layers to map.
        token_features (`int`):
            Width of the features of a token, which every target layer reads too, 0 if it reads none.
        previous_tokens (`int`):
            Tokens before each token that are candidates.
        by_head (`bool`, *optional*, defaults to `False`):
            Whether each target head reads one head of a source layer, the best, instead of all of them.
        seed (`int`, *optional*, defaults to 0):
            Of the projections.
        width (`int`, *optional*, defaults to 96):
            Of the projection of one layer's keys and values.
    """

    def __init__(
        self,
        source: KVGeometry,
        target_layers: Mapping[int, LayerGeometry],
        token_features: int,
        previous_tokens: int,
        by_head: bool = False,
        seed: int = 0,
        width: int = 96,
    ):
        self._generator = torch.Generator().manual_seed(seed)
        heads = _heads if by_head else _whole
        self._x, self._y = _Projections(self._generator), _Projections(self._generator)
        self._tokens = token_blocks(previous_tokens) if token_features else []
        for name in self._tokens:
            self._x.add(name, token_features, [torch.arange(token_features)], width)
        self._source_layers = [i for i, layer in enumerate(source.layers) if layer is not None]
        for i in self._source_layers:
            layer = source.layers[i]
            self._x.add(("source", i), sum(layer.widths), [torch.cat(parts) for parts in heads(layer)], width)
        for i, layer in target_layers.items():
            self._y.add(("target", i), sum(layer.widths), [part for parts in heads(layer) for part in parts], width)
        self._train, self._held_out = (Moments([("x", "x"), ("x", "y")]) for _ in range(2))

    def add(self, rows: Mapping[Hashable, torch.Tensor], held_out: bool) -> None:
        """Take in a batch of [`PairedStates.read`]."""
        (self._held_out if held_out else self._train).add({"x": self._x.project(rows), "y": self._y.project(rows)})

    @property
    def sums(self) -> dict[str, Moments]:
        """Everything that was taken in, for a [`Checkpoint`]."""
        return {"train": self._train, "held_out": self._held_out}

    @property
    def counts(self) -> tuple[int, int]:
        """Rows taken in to fit on, and held out."""
        return self._train.count, self._held_out.count

    def reduce(self, processes: Processes) -> None:
        """Take in what the other processes have read."""
        self._train.reduce(processes)
        self._held_out.reduce(processes)

    def correlations(self) -> Correlations:
        """Of everything taken in so far, for [`LayerScreening.steps`]."""
        return Correlations.of(
            *(
                Gaussian(
                    sums.mean(["x"]),
                    sums.mean(["y"]),
                    sums.covariance_blocks(["x"]),
                    sums.covariance(["x"], ["y"]),
                    sums.variance(["y"]),
                )
                for sums in (self._train, self._held_out)
            )
        )

    def steps(
        self,
        correlations: Correlations,
        target_layer: int,
        cost: Callable[[Inputs], float],
        previous_tokens: int = 0,
        importance: tuple[float, float] | None = None,
    ) -> Iterator[Step]:
        """
        What a target layer should read, in the order in which it should take it, each computed when it is asked for.

        The first is one of the cheapest source layers, so that the smallest mapper is the one made of first steps.

        Args:
            correlations ([`Correlations`]):
                Of this screening.
            target_layer (`int`):
                The target layer.
            cost (`Callable[[Inputs], float]`):
                What reading some inputs costs. The order is that of the gain for each unit of it.
            previous_tokens (`int`, *optional*, defaults to 0):
                Tokens before each token that are taken before all else. Further ones are candidates.
            importance (`tuple[float, float]`, *optional*):
                What the shares of explained variance of keys and of values are worth, by default 1 of each.
        """
        layer = _LayerSelection(correlations, self._y.columns["target", target_layer], importance or (1.0, 1.0))
        inputs = Inputs([], previous_tokens)
        for name in self._tokens[: 1 + previous_tokens]:
            layer.take_everywhere(self._x.columns[name][0])
        while True:
            candidates: dict[Hashable, Inputs] = {
                ("source", i): inputs.with_layer(i) for i in self._source_layers if i not in inputs.source_layers
            }
            paid = cost(inputs) if inputs.source_layers else 0.0
            costs = {name: cost(candidate) - paid for name, candidate in candidates.items()}
            if not inputs.source_layers:
                candidates = {name: candidates[name] for name, c in costs.items() if c == min(costs.values())}
            else:
                for name in self._tokens[1 + inputs.previous_tokens :][:1]:
                    candidates[name] = inputs.with_token()
                    costs[name] = cost(candidates[name]) - paid
            if not candidates:
                return
            names = list(candidates)
            gains, blocks = zip(*layer.gains([self._x.columns[name] for name in names]), strict=True)
            best = max(range(len(names)), key=lambda k: gains[k] / max(costs[names[k]], 1.0))
            inputs = candidates[names[best]]
            yield Step(inputs, gains[best], costs[names[best]])
            layer.take(blocks[best])


class _LayerSelection:
    """What explains one target layer, for all heads at once or for each by itself."""

    def __init__(self, correlations: Correlations, parts: Sequence[torch.Tensor], importance: tuple[float, float]):
        # Keys and values of a head, or of all heads.
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        self._selections = [ForwardSelection(correlations, torch.cat(pair)) for pair in pairs]
        # Each head counts by what it has of the layer's variance.
        shares = [
            worth / correlations.variance[torch.cat(kind)].sum().clamp(min=1e-300)
            for worth, kind in zip(importance, zip(*pairs, strict=True), strict=True)
        ]
        self._scales = [
            torch.cat([share.expand(len(part)) for part, share in zip(pair, shares, strict=True)]) for pair in pairs
        ]

    def gains(self, layers: Sequence[Sequence[torch.Tensor]]) -> list[tuple[float, list[torch.Tensor]]]:
        """For each source layer, of which each head takes one block, what that explains, and which blocks."""
        gains = [0.0] * len(layers)
        chosen: list[list[torch.Tensor]] = [[] for _ in layers]
        for selection, scale in zip(self._selections, self._scales, strict=True):
            residuals = iter(selection.residuals_with([block for blocks in layers for block in blocks]))
            for number, blocks in enumerate(layers):
                added = [float(((selection.residual - next(residuals)) * scale).sum()) for _ in blocks]
                gains[number] += max(added)
                chosen[number].append(blocks[added.index(max(added))])
        return list(zip(gains, chosen, strict=True))

    def take_everywhere(self, block: torch.Tensor) -> None:
        """Take one block for all heads."""
        self.take([block] * len(self._selections))

    def take(self, blocks: Sequence[torch.Tensor]) -> None:
        """Take a block for each head."""
        for selection, block in zip(self._selections, blocks, strict=True):
            selection.take(block)


def _heads(layer: LayerGeometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [key_value_columns(layer, head) for head in range(layer.num_key_value_heads)]


def _whole(layer: LayerGeometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [key_value_columns(layer)]


class _Projections:
    """Blocks of rows, each part of their columns projected by itself, side by side."""

    def __init__(self, generator: torch.Generator):
        self.columns: dict[Hashable, list[torch.Tensor]] = {}
        self._matrices: dict[Hashable, torch.Tensor] = {}
        self._generator = generator
        self._width = 0

    def add(self, name: Hashable, width: int, parts: Sequence[torch.Tensor], projected: int) -> None:
        """Project the parts of a block to `projected` columns together."""
        matrices, columns = [], []
        for part in parts:
            matrix = torch.zeros(width, min(len(part), max(projected // len(parts), LEAST_WIDTH)))
            if matrix.shape[1] == len(part):
                matrix[part] = torch.eye(len(part))
            else:
                noise = torch.randn(len(part), matrix.shape[1], generator=self._generator)
                matrix[part] = noise / matrix.shape[1] ** 0.5
            columns.append(torch.arange(self._width, self._width + matrix.shape[1]))
            self._width += matrix.shape[1]
            matrices.append(matrix)
        self.columns[name], self._matrices[name] = columns, torch.cat(matrices, 1)

    def project(self, rows: Mapping[Hashable, torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [rows[name].float() @ matrix.to(rows[name].device) for name, matrix in self._matrices.items()], 1
        )

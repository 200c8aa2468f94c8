"""How much each target layer may read, if a mapper is not to exceed a size or a cost."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from ..compat import input_device
from ..errors import CalibrationError
from .arguments import BYTES
from .costs import MapPlan
from .inputs import Inputs
from .selection import Step


_BUDGET = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(BYTES)}|tokens/s)")
# Enough for a steady figure, little enough not to be waited for.
_TIMED_TOKENS, _TIMED_SECONDS = 512, 0.2


@dataclasses.dataclass(frozen=True)
class Budget:
    """
    A limit for the sum of what a mapper's layer maps cost.

    Args:
        limit (`float`):
            The most that all maps may cost together.
        unit (`str`):
            `"bytes"`, or `"multiply-adds"` for each token.
    """

    limit: float
    unit: str

    @classmethod
    def parse(cls, budget: str | int, target: PreTrainedModel, plan: MapPlan) -> "Budget":
        """
        Args:
            budget (`str` or `int`):
                Bytes of the saved weights (`45_000_000`, `"45MB"`, decimal), or a rate of translation
                (`"20000tokens/s"`), for which a product as wide as the models' layers is timed on the target's device.
            target (`PreTrainedModel`):
                The target model.
            plan ([`MapPlan`]):
                What maps cost.

        Raises:
            `ValueError`: it is none of these.
        """
        if type(budget) is int and budget > 0:
            return cls(budget - plan.file_overhead(), "bytes")
        match = _BUDGET.fullmatch(budget.strip()) if isinstance(budget, str) else None
        if match is None or not float(match[1]):
            raise ValueError(
                f"`budget` must be a positive number of bytes, or like '45MB' or '20000tokens/s', got {budget!r}."
            )
        amount, unit = float(match[1]), match[2]
        if unit in BYTES:
            return cls(amount * BYTES[unit] - plan.file_overhead(), "bytes")
        return cls(_products_per_second(target, plan) / amount, "multiply-adds")

    def cost(self, plan: MapPlan, target_layer: int, inputs: Inputs) -> float:
        """What a map costs, in the budget's unit."""
        measure = plan.num_bytes if self.unit == "bytes" else plan.num_products
        return measure(target_layer, inputs)

    def spend(self, steps: Callable[[int], Iterator[Step]], target_layers: Sequence[int]) -> dict[int, Inputs]:
        """
        One source layer for each target layer, then again and again the step that gains most for what it costs, until
        it does not fit. A larger budget goes on from where a smaller one stops.

        Args:
            steps (`Callable[[int], Iterator[Step]]`):
                For a target layer the steps in the order in which it would take them. The first is one of the
                cheapest.
            target_layers (`Sequence[int]`):
                The target layers to map.

        Returns:
            `dict[int, Inputs]`: For each target layer what it reads.

        Raises:
            `CalibrationError`: one source layer for each target layer is already too much.
        """
        paths = {i: steps(i) for i in target_layers}
        first = {i: next(path) for i, path in paths.items()}
        chosen = {i: step.inputs for i, step in first.items()}
        left = self.check({i: step.cost for i, step in first.items()})
        upcoming = _upcoming(paths, paths)
        while upcoming:
            i = max(upcoming, key=lambda i: upcoming[i].gain / max(upcoming[i].cost, 1.0))
            if upcoming[i].cost > left:
                break
            step = upcoming.pop(i)
            chosen[i] = step.inputs
            left -= step.cost
            upcoming |= _upcoming(paths, [i])
        return chosen

    def check(self, costs: Mapping[int, float]) -> float:
        """
        What is left when the smallest map of each target layer is paid for.

        Raises:
            `CalibrationError`: they cost more than there is.
        """
        smallest = sum(costs.values())
        if smallest > self.limit:
            raise CalibrationError(
                f"The `budget` leaves {self._describe(self.limit)}, but the smallest mapper of this kind, one source "
                f"layer for each target layer, takes {self._describe(smallest)}. Allow that much, or choose another "
                "`kind`, a lower `rank`, fewer `storage_bits` or more `native_layers`."
            )
        return self.limit - smallest

    def _describe(self, amount: float) -> str:
        return f"{amount / 1e6:.3f} MB" if self.unit == "bytes" else f"{amount:.0f} {self.unit} a token"


def _upcoming(paths: Mapping[int, Iterator[Step]], target_layers: Sequence[int] | Mapping) -> dict[int, Step]:
    """The next step of each of some target layers, if there is one that gains anything."""
    steps = {i: next(paths[i], None) for i in target_layers}
    return {i: step for i, step in steps.items() if step is not None and step.gain > 0}


def _products_per_second(target: PreTrainedModel, plan: MapPlan) -> float:
    """Multiply-adds a second of a product from a source layer's width to a target layer's, where the target runs."""
    inner, outer = (max(map(side.num_features, range(len(side.layers)))) for side in (plan.source, plan.target))
    device = input_device(target)
    states, weight = (
        torch.ones(shape, dtype=target.dtype, device=device) for shape in ((_TIMED_TOKENS, inner), (inner, outer))
    )
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
    for warm_up in (True, False):
        repeats, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < (_TIMED_SECONDS / 4 if warm_up else _TIMED_SECONDS):
            states @ weight
            synchronize()
            repeats += 1
    return repeats * _TIMED_TOKENS * inner * outer / seconds

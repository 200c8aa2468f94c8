"""What sums and solves take, which target layers have room together, and what to do where there is none."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations_with_replacement

import torch

from ..errors import CalibrationError
from .costs import MapPlan
from .inputs import Inputs


_FLOAT64 = 8
# Matrices of a layer's features by its targets that are there at once: covariances on both kinds of rows, what is
# solved for, a solution, the best one so far for keys and for values, and both of these side by side.
_SOLUTIONS = 7


def sum_bytes(plan: MapPlan, selection: Mapping[int, Inputs]) -> int:
    """Bytes of the sums for some target layers, each with what it reads: on both kinds of rows."""
    products: dict[tuple, int] = {}
    for i, inputs in selection.items():
        widths = dict(zip(inputs.blocks(bool(plan.token_features)), _widths(plan, inputs), strict=True))
        # The products of two blocks are shared by all target layers that read both.
        products |= {(a, b): widths[a] * widths[b] for a, b in combinations_with_replacement(widths, 2)}
        products |= {(a, "target", i): width * plan.target.num_features(i) for a, width in widths.items()}
    return 2 * _FLOAT64 * sum(products.values())


def _widths(plan: MapPlan, inputs: Inputs) -> list[int]:
    """Of the blocks that a map reads."""
    tokens = [plan.token_features] * (1 + inputs.previous_tokens) if plan.token_features else []
    return [*(plan.source.num_features(j) for j in inputs.source_layers), *tokens]


def solve_bytes(plan: MapPlan, target_layer: int, inputs: Inputs) -> int:
    """Bytes that the solve of one target layer takes beside the sums."""
    widths = _widths(plan, inputs)
    features, targets = sum(widths), plan.target.num_features(target_layer)
    if plan.kind == "head_matched":
        # Which heads match is found on both covariances whole, with some rows for each feature that is taken.
        taken = plan.num_features(target_layer, inputs)
        numbers = 2 * features**2 + 7 * taken * features
    else:
        # The triangular factor, and the block that is being made.
        numbers = (features**2 + sum(width**2 for width in widths)) // 2 + 2 * max(widths) ** 2
    return _FLOAT64 * (numbers + _SOLUTIONS * features * targets)


def memory_groups(plan: MapPlan, selection: Mapping[int, Inputs], memory: int | None) -> list[dict[int, Inputs]]:
    """
    Target layers whose sums, and the solve of the largest of them, have room together, in their order.

    Args:
        plan ([`MapPlan`]):
            The kind of the maps.
        selection (`Mapping[int, Inputs]`):
            For each target layer what it reads.
        memory (`int`, *optional*):
            Bytes. `None` for all target layers in one group.

    Raises:
        `CalibrationError`: a target layer has no room even alone; or `memory` is `None`, and there is less than that
            in this machine.
    """

    def needed(group: Mapping[int, Inputs]) -> int:
        return sum_bytes(plan, group) + max(solve_bytes(plan, i, inputs) for i, inputs in group.items())

    largest = max(selection, key=lambda i: needed({i: selection[i]}))
    alone = needed({largest: selection[largest]})
    if memory is None:
        if needed(selection) > _installed():
            raise CalibrationError(
                f"The sums for {len(selection)} target layers take {needed(selection) / 1e9:.1f} GB, which this "
                f"machine does not have. Pass `memory`, '{alone / 1e9:.1f}GB' or more, and a `checkpoint` folder with "
                "room for states, to take them in groups, or lower `num_source_layers`."
            )
        return [dict(selection)]
    if alone > memory:
        raise CalibrationError(
            f"`memory` is {memory / 1e9:.1f} GB, but target layer {largest} takes {alone / 1e9:.1f} GB even alone: it "
            f"reads {len(selection[largest].source_layers)} source layers. Allow that much, or lower "
            "`num_source_layers`."
        )
    groups: list[dict[int, Inputs]] = [{}]
    for i, inputs in selection.items():
        if needed(groups[-1] | {i: inputs}) > memory:
            groups.append({})
        groups[-1][i] = inputs
    return groups


def _installed() -> float:
    """Bytes of memory in this machine, infinite where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


@contextmanager
def explained_memory_error(where: str, advice: str) -> Iterator[None]:
    """
    Args:
        where (`str`):
            What is done in this context.
        advice (`str`):
            What takes less.

    Raises:
        `CalibrationError`: memory ran out in here.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has no class of its own for memory that the CPU lacks.
        known = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not known:
            raise
        raise CalibrationError(
            f"Memory ran out {where} ({str(error).splitlines()[0] if str(error) else 'MemoryError'}). {advice}. With "
            "a `checkpoint` the fit goes on from what was summed before."
        ) from error

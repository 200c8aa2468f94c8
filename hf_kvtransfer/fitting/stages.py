"""The stages of a fit: source layers are chosen, sums taken over all text, and layers solved from them."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..compat import input_device
from ..errors import CalibrationError
from ..geometry import LayerGeometry
from .budget import Budget
from .captured_states import CapturedStates
from .checkpoint import Checkpoint
from .closest_layer import ClosestLayer
from .costs import MapPlan
from .inputs import Inputs
from .memory import explained_memory_error
from .moments import Moments
from .processes import Processes
from .ridge import Gaussian
from .selection import LayerScreening
from .solve import LayerProblem
from .states import PairedStates


@dataclasses.dataclass(frozen=True)
class Reading:
    """
    How text is read, in every stage the same.

    Args:
        states ([`PairedStates`]):
            Reads batches with both models.
        batch_size (`int`), held_out_every (`int`):
            As in [`PairedStates.batches`].
        checkpoint ([`Checkpoint`]):
            Where sums are written.
        processes ([`Processes`]):
            Those that the batches are dealt to.
    """

    states: PairedStates
    batch_size: int
    held_out_every: int
    checkpoint: Checkpoint
    processes: Processes

    def add(self, stage: str, texts: Iterable, sums: Any, results: dict[str, Any], progress: Any) -> int:
        """
        Add this process's share of the texts to `sums`, which has an `add(rows, held_out)` and named parts in `sums`,
        for the checkpoint.

        Returns:
            `int`: The number of texts, of all processes.

        Raises:
            `CalibrationError`: memory runs out.
        """
        num_texts = 0
        batches = self.states.batches(texts, self.batch_size, self.held_out_every)
        for held_out, batch, is_new in self.checkpoint.run(stage, batches, sums.sums, results):
            if is_new:
                with explained_memory_error(f"in a batch of {len(batch)} texts", "Lower `batch_size` or `max_length`"):
                    sums.add(self.states.read(batch), held_out)
            num_texts += len(batch)
            progress.update(len(batch))
        return num_texts


def choose_inputs(
    reading: Reading,
    texts: Sequence,
    plan: MapPlan,
    target_layers: Mapping[int, LayerGeometry],
    num_source_layers: int,
    previous_tokens: int,
    importance: Mapping[int, tuple[float, float]],
    budget: Budget | None,
    seed: int,
) -> dict[int, Inputs]:
    """
    Read the first texts and choose what each target layer reads.

    Args:
        reading ([`Reading`]):
            How text is read.
        texts (`Sequence`):
            The texts to choose on.
        plan ([`MapPlan`]):
            The kind of the maps, and what they cost.
        target_layers (`Mapping[int, LayerGeometry]`):
            The target layers to map.
        num_source_layers (`int`):
            Source layers for each target layer, where there is no budget.
        previous_tokens (`int`):
            Tokens before each token that each target layer reads; with a budget at most.
        importance (`Mapping[int, tuple[float, float]]`):
            As in [`fit_mapper`].
        budget ([`Budget`], *optional*):
            What all maps may cost together.
        seed (`int`):
            Of the random projections.

    Returns:
        `dict[int, Inputs]`: For each target layer what it reads.
    """
    if plan.kind == "identity":
        closest = ClosestLayer(plan.source, target_layers)
        _read_to_choose(reading, texts, closest)
        selection = {i: Inputs(layers) for i, layers in closest.select().items()}
        if budget is not None:
            budget.check({i: budget.cost(plan, i, inputs) for i, inputs in selection.items()})
        return selection
    by_head = plan.kind == "head_matched"
    screening = LayerScreening(plan.source, target_layers, plan.token_features, previous_tokens, by_head, seed)
    _read_to_choose(reading, texts, screening)
    correlations = screening.correlations()
    if budget is None:
        paths = (
            screening.steps(correlations, i, _count_layers, previous_tokens, importance.get(i)) for i in target_layers
        )
        last = (list(itertools.islice(path, num_source_layers))[-1] for path in paths)
        return {i: step.inputs for i, step in zip(target_layers, last, strict=True)}
    return budget.spend(
        lambda i: screening.steps(
            correlations, i, lambda inputs: budget.cost(plan, i, inputs), importance=importance.get(i)
        ),
        list(target_layers),
    )


def _count_layers(inputs: Inputs) -> int:
    return len(inputs.source_layers)


def _read_to_choose(reading: Reading, texts: Sequence, screening: ClosestLayer | LayerScreening) -> None:
    with logging.tqdm(desc="Choosing source layers", unit="text", total=len(texts)) as progress:
        num_texts = reading.add("choosing", texts, screening, {}, progress)
    screening.reduce(reading.processes)
    check_enough_text(1, *screening.counts, num_texts, reading.held_out_every)


class LayerSums:
    """
    Sums over all text, from which every target layer is solved.

    Args:
        plan ([`MapPlan`]):
            What the maps read besides source layers.
        selection (`Mapping[int, Inputs]`):
            For each target layer what it reads.
        dtype (`torch.dtype`):
            Of the products of one batch.
    """

    def __init__(self, plan: MapPlan, selection: Mapping[int, Inputs], dtype: torch.dtype):
        self._plan, self.selection = plan, selection
        self._blocks = {i: inputs.blocks(bool(plan.token_features)) for i, inputs in selection.items()}
        # Which products the solves need: features with features, and with their target layer.
        pairs: dict = {}
        for i, names in self._blocks.items():
            pairs |= dict.fromkeys(itertools.combinations_with_replacement(names, 2))
            pairs |= dict.fromkeys((name, ("target", i)) for name in names)
        self.train, self.held_out = (Moments(pairs, dtype) for _ in range(2))

    @property
    def blocks(self) -> list[Hashable]:
        """Names of the blocks of rows that are read."""
        return self.train.blocks

    @property
    def sums(self) -> dict[str, Moments]:
        """For the [`Checkpoint`]."""
        return {"train": self.train, "held_out": self.held_out}

    def reduce(self, processes: Processes) -> None:
        """Take in what the other processes have summed."""
        self.train.reduce(processes)
        self.held_out.reduce(processes)

    def add(self, rows: Mapping, held_out: bool) -> None:
        """Take in a batch of [`PairedStates.read`]."""
        (self.held_out if held_out else self.train).add(rows)

    def problem(self, target_layer: int, metric: torch.Tensor | None) -> LayerProblem:
        """What a target layer is solved from."""
        train, held_out = (self._gaussian(moments, target_layer) for moments in (self.train, self.held_out))
        source = [self._plan.source.layers[j] for j in self.selection[target_layer].source_layers]
        return LayerProblem(train, held_out, source, self._plan.target.layers[target_layer], metric)

    def _gaussian(self, moments: Moments, target_layer: int) -> Gaussian:
        names, target = self._blocks[target_layer], [("target", target_layer)]
        return Gaussian(
            moments.mean(names),
            moments.mean(target),
            moments.covariance_blocks(names),
            moments.covariance(names, target),
            moments.variance(target),
        )


def sum_in_groups(
    reading: Reading,
    texts: Iterable,
    plan: MapPlan,
    groups: Sequence[Mapping[int, Inputs]],
    dtype: torch.dtype,
    results: dict[str, Any],
    progress: Any,
) -> tuple[int, tuple[int, int], Iterator[LayerSums]]:
    """
    Read all text, and sum over it for one group of target layers after another.

    Args:
        reading ([`Reading`]):
            How text is read.
        texts (`Iterable`):
            All of it.
        plan ([`MapPlan`]):
            What the maps read besides source layers.
        groups (`Sequence[Mapping[int, Inputs]]`):
            For each target layer of a group what it reads. Of one group sums are taken as the text is read, of
            more the states are written to files first.
        dtype (`torch.dtype`):
            Of the products of one batch.
        results (`dict`), progress:
            For [`Reading.add`].

    Returns:
        `tuple[int, tuple[int, int], Iterator[LayerSums]]`: The number of texts, of rows to fit on and held out, and
        the sums of each group, made when they are asked for.
    """
    if len(groups) == 1:
        sums = LayerSums(plan, groups[0], dtype)
        num_texts = reading.add("summing", texts, sums, results, progress)
        sums.reduce(reading.processes)
        return num_texts, (sums.train.count, sums.held_out.count), iter([sums])
    names = dict.fromkeys(name for group in groups for name in LayerSums(plan, group, dtype).blocks)
    captured = CapturedStates(reading.checkpoint.states_folder, list(names))
    num_texts = reading.add("capturing", texts, captured, results, progress)
    train, held_out = reading.processes.sum(torch.tensor(captured.counts)).tolist()
    device = input_device(reading.states.target)

    def sum_up(group: Mapping[int, Inputs]) -> LayerSums:
        sums = LayerSums(plan, group, dtype)
        for is_held_out in (False, True):
            for rows in captured.rows(sums.blocks, is_held_out, device):
                sums.add(rows, is_held_out)
        sums.reduce(reading.processes)
        return sums

    return num_texts, (train, held_out), map(sum_up, groups)


def check_enough_text(
    num_features: int, num_train: int, num_held_out: int, num_texts: int, held_out_every: int
) -> None:
    """
    Raises:
        `CalibrationError`: there is too little text for the number of features, or none of it is held out.
    """
    if num_train < 2 * num_features:
        raise CalibrationError(
            f"{num_texts} texts gave {num_train} tokens to fit on, but a layer has {num_features} features, for which "
            f"at least {2 * num_features} are needed: give more text, or lower `num_source_layers` or the `budget`."
        )
    if not num_held_out:
        raise CalibrationError(
            f"{num_texts} texts gave {num_train} tokens to fit on and 0 held out, where each {held_out_every}th text "
            "is: give more text, or lower `held_out_every`."
        )


def take_tokens(states: PairedStates, texts: Iterable, num_tokens: int | None) -> Iterator:
    """The first of some texts, until they have `num_tokens` tokens of the target; all of them for `None`."""
    left = float("inf") if num_tokens is None else num_tokens
    texts = iter(texts)
    while left > 0 and (text := next(texts, None)) is not None:
        yield text
        left -= states.cut(text)[1]

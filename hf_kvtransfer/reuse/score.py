"""KVShareArena's account: quality recovered, with everything charged that a request costs, and building apart."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..compat import read_into_cache, token_losses
from ..fidelity.prompts import PromptEncoder
from ..fidelity.statistics import shares_of_first
from ..fidelity.tables import Table
from .request import ReuseMethod, ReuseQuestion, ReuseRequest


FULL, FLOOR = "full prefill", "no context"


@dataclasses.dataclass(frozen=True)
class MethodScore:
    """
    What a method does to one group of questions. Means over questions, and with its caches in hand.

    Args:
        questions (`int`):
            In the group.
        loss (`float`):
            On the answers, in nats per token.
        gap_recovered (`dict[str, float]`, *optional*):
            `(no context - method) / (no context - full prefill)` of the losses: `value`, and `low` and `high` of a
            95 % bootstrap over questions. `None` where the context does not clearly help, and below 8 questions.
        compute_saved (`float`):
            1 less the multiplications for the prompt as a share of those of a full prefill. Negative where the method
            takes more.
        seconds (`float`):
            Until the answer's first token can be sampled.
        held_bytes (`float`):
            What is kept of the chunks for a request.
    """

    questions: int
    loss: float
    gap_recovered: dict[str, float] | None
    compute_saved: float
    seconds: float
    held_bytes: float

    def share_score(self, beta: float) -> float | None:
        """
        KVShareArena's score, `(1 + beta) * q * c / (beta * q + c)` of the gap recovered `q` and the compute saved `c`,
        both cut to 0 to 1. The smaller `beta`, the more quality counts.
        """
        if self.gap_recovered is None:
            return None
        quality, saved = (min(max(x, 0.0), 1.0) for x in (self.gap_recovered["value"], self.compute_saved))
        return (1 + beta) * quality * saved / (beta * quality + saved) if quality and saved else 0.0


@dataclasses.dataclass(frozen=True)
class ReuseScore:
    """
    What methods are worth.

    Args:
        groups (`dict[str, dict[str, MethodScore]]`):
            `"one source"` and `"several sources"`, by how many chunks an answer needs, as far as there are such
            questions; in each the methods by name, the full prefill and no context among them.
        build_seconds (`dict[str, float]`):
            What a method has spent once on all chunks, by its name.
    """

    groups: dict[str, dict[str, MethodScore]]
    build_seconds: dict[str, float]

    def tables(self) -> list[Table]:
        """One for each group."""
        built = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.build_seconds.items())
        header = ["method", "loss", "gap recovered", "compute saved", "seconds", "MB held", "S(0.1)", "S(1)"]
        note = f"For each request, with the caches of the chunks in hand. Building them, once: {built}."
        return [
            Table(
                f"Questions that need {group}",
                header,
                [
                    [
                        name,
                        f"{score.loss:.3f}",
                        _interval(score.gap_recovered),
                        f"{score.compute_saved:.3f}",
                        f"{score.seconds:.3f}",
                        f"{score.held_bytes / 1e6:.1f}",
                        *("-" if (share := score.share_score(beta)) is None else f"{share:.3f}" for beta in (0.1, 1)),
                    ]
                    for name, score in scores.items()
                ],
                note,
            )
            for group, scores in self.groups.items()
        ]


def score_reuse(
    questions: Sequence[ReuseQuestion],
    target: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase,
    methods: Mapping[str, ReuseMethod],
) -> ReuseScore:
    """
    Let a target answer questions on caches of several origins.

    Each chunk is built once for each method. A request is then charged with all that it takes until the answer's first
    token: making the cache of its chunks, and reading what is not in it. Multiplications are those that torch counts
    (matrix products, and attention where its kernel is known to it), the same way for all.

    Args:
        questions (`Sequence[ReuseQuestion]`):
            Whose answers are known.
        target (`PreTrainedModel`):
            The model that answers.
        target_tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, a fast one.
        methods (`Mapping[str, ReuseMethod]`):
            By name.

    Returns:
        [`ReuseScore`]

    Raises:
        `ValueError`: there are no questions, or a method has the name of a control.
    """
    if not questions:
        raise ValueError("`questions` is empty: there is nothing to score.")
    if reserved := sorted({FULL, FLOOR} & set(methods)):
        raise ValueError(f"`methods` names one {reserved[0]!r}, which is measured anyway. Call it otherwise.")
    encoder = PromptEncoder(target_tokenizer)
    build_seconds = dict.fromkeys(methods, 0.0)
    built: dict[str, dict[str, Any]] = {name: {} for name in methods}
    rows: dict[str, list[dict[str, _Answer]]] = {"one source": [], "several sources": []}
    for question in questions:
        request = ReuseRequest.make(question, encoder)
        for name, method in methods.items():
            for chunk in set(question.chunks) - built[name].keys():
                began = time.perf_counter()
                built[name][chunk] = method.build(chunk)
                build_seconds[name] += time.perf_counter() - began
        empty = partial(DynamicCache, config=target.config)
        answers = {
            FULL: _answer(target, request, request.input_ids, empty),
            FLOOR: _answer(target, request, request.without_context(), empty),
        }
        for name, method in methods.items():
            kept = [built[name][chunk] for chunk in question.chunks]
            held = sum(map(method.held_bytes, kept))
            answers[name] = _answer(target, request, request.input_ids, partial(method.prepare, request, kept), held)
        rows["one source" if question.num_sources == 1 else "several sources"].append(answers)
    return ReuseScore({group: _scores(answers) for group, answers in rows.items() if answers}, build_seconds)


@dataclasses.dataclass(frozen=True)
class _Answer:
    loss: float
    tokens: int
    flops: int
    seconds: float
    held_bytes: int


def _answer(
    target: PreTrainedModel, request: ReuseRequest, prompt: torch.Tensor, make: Callable[[], Cache], held: int = 0
) -> _Answer:
    def read() -> tuple[Cache, torch.Tensor]:
        cache = make()
        logits = read_into_cache(target, cache, prompt[:, int(cache.get_seq_length()) :], num_logits=1)
        if logits is None:
            raise ValueError(f"`target` is a {type(target).__name__}, which has no language modelling head.")
        return cache, logits.cpu()  # waits for the device

    with FlopCounterMode(display=False) as counter:
        read()
    began = time.perf_counter()
    cache, logits = read()
    seconds = time.perf_counter() - began
    ids = torch.tensor([request.answer_ids])
    if ids.shape[1] > 1:
        rest = read_into_cache(target, cache, ids[:, :-1], num_logits=ids.shape[1] - 1)
        logits = torch.cat([logits, rest.cpu()], dim=1)
    return _Answer(float(token_losses(logits, ids).sum()), ids.shape[1], counter.get_total_flops(), seconds, held)


def _scores(answers: list[dict[str, _Answer]]) -> dict[str, MethodScore]:
    names = list(answers[0])
    losses = np.array([[row[name].loss for name in names] for row in answers])
    # What each is better by than no context; the full prefill comes first.
    gained = losses[:, [names.index(FLOOR)]] - losses
    gaps = shares_of_first(gained) or [None] * len(names)
    tokens = sum(row[FULL].tokens for row in answers)
    flops = {name: sum(row[name].flops for row in answers) for name in names}
    return {
        name: MethodScore(
            len(answers),
            float(losses[:, i].sum() / tokens),
            gaps[i],
            1 - flops[name] / flops[FULL],
            sum(row[name].seconds for row in answers) / len(answers),
            sum(row[name].held_bytes for row in answers) / len(answers),
        )
        for i, name in enumerate(names)
    }


def _interval(share: dict[str, float] | None) -> str:
    return "-" if share is None else f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"

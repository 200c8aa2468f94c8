"""Transfer or re-prefill, decided for each request."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..effort import check_effort
from ..mapper import KVMapper
from .costs import MeasuredCosts
from .error_rate import error_rates
from .machine import LoadMeter, free_memory
from .measuring import measure_costs
from .time_model import TimeModel


@dataclasses.dataclass(frozen=True)
class Decision:
    """
    What a policy decided for one request, and the estimate behind it.

    Args:
        choice (`str`):
            `"transfer"`, or `"recompute"` if the target is to read the context itself.
        tokens (`int`), batch_size (`int`), effort (`float`):
            Of the context, rows, and the share of the tokens that the target reads again.
        prefill_seconds (`float`):
            What the target's own prefill would take now.
        handoff_seconds (`float`):
            What a handoff would take now, and the prefill behind it as often as the probe refuses.
        wrong_answer_seconds (`float`):
            What the wrong answers of a handoff are expected to cost, above those of a prefill.
        saved_seconds (`float`):
            What a handoff is worth: the difference of the first two for everybody who waits, less the third.
        break_even_tokens (`int`, *optional*):
            From this length on a handoff is worth it. `None` if there is none.
        slowdown (`float`):
            How much slower the machine was than when it was measured.
        reason (`str`):
            Why, for people.
    """

    choice: Literal["transfer", "recompute"]
    tokens: int
    batch_size: int
    effort: float
    prefill_seconds: float
    handoff_seconds: float
    wrong_answer_seconds: float
    saved_seconds: float
    break_even_tokens: int | None
    slowdown: float
    reason: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.reason}"


class TransferPolicy:
    """
    Decides whether a handoff is worth it: for a short context a prefill is faster, and for a cheap one it is not worth
    an answer that might be wrong. Make one with [`TransferPolicy.calibrate`], and give it to [`TranslatedCache`].

    Whether a mapper may be used at all is the gate's business. A policy weighs what it saves.

    Args:
        costs ([`MeasuredCosts`]):
            Of the pair, on this machine.
        error_rate (`float` or `Mapping[float, float]`, *optional*, defaults to 0.0):
            Share of answers that are wrong because of a handoff, or for 0 and other efforts those shares. An effort
            counts as the largest known one that is not above it, and 1, a prefill, leaves nothing wrong.
        wrong_answer_seconds (`float`, *optional*, defaults to 0.0):
            How long a user would rather wait than get a wrong answer.
        refusal_rate (`float`, *optional*, defaults to 0.0):
            Share of right translations that the probe refuses, after which the target reads the context after all.
        concurrency (`int`, *optional*, defaults to 1):
            Requests that wait for the target's device, this one included: each of them waits for the others, and needs
            a cache of its own. May be set at any time.

    Example:

    ```python
    >>> policy = TransferPolicy.calibrate(mapper, source, target, target_tokenizer=tokenizer, wrong_answer_seconds=10)
    >>> print(policy.decide(tokens=2000))
    transfer: 2,000 tokens take 8.31 s to read and 1.52 s to hand over; worth it from 950 tokens on
    >>> cache = TranslatedCache(source_kv, mapper, target, target_tokenizer=tokenizer, policy=policy)
    ```
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        *,
        error_rate: float | Mapping[float, float] = 0.0,
        wrong_answer_seconds: float = 0.0,
        refusal_rate: float = 0.0,
        concurrency: int = 1,
    ):
        rates = error_rate if isinstance(error_rate, Mapping) else {0.0: error_rate}
        if 0 not in rates:
            raise ValueError(f"`error_rate` must say what is wrong without an effort, got {sorted(rates)}.")
        for name, shares in (("error_rate", rates.values()), ("refusal_rate", [refusal_rate])):
            for share in shares:
                if not 0 <= share <= 1:
                    raise ValueError(f"`{name}` is a share of 0 to 1, got {share}.")
        if not 0 <= wrong_answer_seconds < math.inf:
            raise ValueError(f"`wrong_answer_seconds` must be 0 or more, got {wrong_answer_seconds}.")
        self.costs, self.error_rates, self.refusal_rate = costs, dict(rates), refusal_rate
        self.wrong_answer_seconds, self.concurrency = wrong_answer_seconds, concurrency
        self._device = None if costs.device is None else torch.device(costs.device)
        self._load = None if self._device is None else LoadMeter(self._device, costs.reference_seconds)

    @classmethod
    def calibrate(
        cls,
        mapper: KVMapper,
        source: PreTrainedModel,
        target: PreTrainedModel,
        *,
        capabilities: Sequence[str] | None = None,
        wrong_answer_seconds: float = 0.0,
        concurrency: int = 1,
        **measuring: Any,
    ) -> "TransferPolicy":
        """
        A policy from measured costs and the mapper's evidence.

        Args:
            mapper ([`KVMapper`]):
                Fitted for the pair, with its evidence.
            source (`PreTrainedModel`), target (`PreTrainedModel`):
                The two models.
            capabilities (`Sequence[str]`, *optional*):
                Those of the evidence that this use asks for, as for [`FidelityGate`]. All by default.
            wrong_answer_seconds (`float`, *optional*), concurrency (`int`, *optional*):
                See [`TransferPolicy`].
            measuring:
                For [`measure_costs`]: `source_tokenizer`, `target_tokenizer`, `lengths`, `runs`, `fresh`. The first
                call takes minutes for large models; later ones read what it has measured.

        Raises:
            `EvidenceError`: the evidence is damaged, or says nothing about one of the `capabilities`.
            As [`measure_costs`].
        """
        report = mapper.evidence
        return cls(
            measure_costs(mapper, source, target, **measuring),
            error_rate=error_rates(report, capabilities),
            wrong_answer_seconds=wrong_answer_seconds,
            refusal_rate=report.probe["false_alarm_rate"] if report is not None and report.probe else 0.0,
            concurrency=concurrency,
        )

    def decide(self, tokens: int, batch_size: int = 1, effort: float = 0.0, question_tokens: int = 0) -> Decision:
        """
        Transfer or re-prefill, at this moment?

        Args:
            tokens (`int`):
                Of the context, in each row.
            batch_size (`int`, *optional*, defaults to 1):
                Number of rows.
            effort (`float`, *optional*, defaults to 0):
                Share of the tokens that the target is to read again, see [`TranslatedCache`].
            question_tokens (`int`, *optional*, defaults to 0):
                So many tokens are known behind the context, which the target reads once more with an `effort`.

        Returns:
            [`Decision`]

        Raises:
            `ValueError`: a number is not positive, `concurrency` is below 1, or `effort` is no share.
        """
        check_effort(effort)
        for name, number in (("tokens", tokens), ("batch_size", batch_size), ("concurrency", self.concurrency)):
            if number < 1:
                raise ValueError(f"`{name}` must be 1 or more, got {number}.")
        slowdown = 1.0 if self._load is None else self._load.slowdown()
        prefill = slowdown * self.costs.prefill.seconds(tokens, batch_size)
        model = self.costs.handoff_with(effort, question_tokens, batch_size)
        handoff = slowdown * model.seconds(tokens, batch_size) + self.refusal_rate * prefill
        errors = 0.0 if effort == 1 else self.error_rates[max(known for known in self.error_rates if known <= effort)]
        wrong = errors * self.wrong_answer_seconds * batch_size
        saved = self.concurrency * (prefill - handoff) - wrong
        break_even = self._break_even(model, batch_size, slowdown, wrong)
        needed = self.concurrency * self.costs.handoff_bytes(tokens, batch_size)
        free = None if self._device is None else free_memory(self._device)
        estimate = f"{tokens:,} tokens take {prefill:.2f} s to read and {handoff:.2f} s to hand over"
        if wrong:
            estimate += f", and wrong answers cost {wrong:.2f} s"
        choice: Literal["transfer", "recompute"] = "transfer" if saved > 0 else "recompute"
        if free is not None and needed > free and choice == "transfer":
            choice = "recompute"
            estimate += (
                f"; a handoff needs {needed / 1e6:,.0f} MB beside the source's cache, {free / 1e6:,.0f} are free"
            )
        elif break_even is not None:
            estimate += f"; worth it from {break_even:,} tokens on"
        return Decision(
            choice, tokens, batch_size, effort, prefill, handoff, wrong, saved, break_even, slowdown, estimate
        )

    def _break_even(self, handoff: TimeModel, batch_size: int, slowdown: float, wrong: float) -> int | None:
        """The least length from which on `saved_seconds` is positive."""
        prefill, kept = self.costs.prefill, 1 - self.refusal_rate
        square = batch_size * (kept * prefill.per_token_squared - handoff.per_token_squared)
        linear = batch_size * (kept * prefill.per_token - handoff.per_token)
        constant = kept * prefill.constant - handoff.constant - wrong / (self.concurrency * slowdown)
        if square < 0:
            return None
        if square == 0 and linear <= 0:
            return 1 if linear == 0 and constant > 0 else None
        if square == 0:
            root = -constant / linear
        else:
            inside = linear**2 - 4 * square * constant
            root = 0.0 if inside < 0 else (math.sqrt(inside) - linear) / (2 * square)
        return max(math.floor(root) + 1, 1)

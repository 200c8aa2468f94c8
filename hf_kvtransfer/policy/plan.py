"""Is a mapper worth fitting, measuring and using, for the traffic at hand?"""

import dataclasses
from collections.abc import Sequence

from ..fidelity.gate import Verdict
from ..fidelity.tables import Table
from .policy import Decision, TransferPolicy


@dataclasses.dataclass(frozen=True)
class Traffic:
    """
    Handoffs of one kind.

    Args:
        tokens (`int`):
            Of the context, as the target counts them.
        handoffs_per_day (`float`):
            How often the target takes over with such a context.
    """

    tokens: int
    handoffs_per_day: float

    def __post_init__(self):
        if self.tokens < 1 or not 0 < self.handoffs_per_day < float("inf"):
            raise ValueError(f"`tokens` and `handoffs_per_day` must be positive, got {self}.")


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """
    What transferring costs and saves over a mapper's lifetime, context by context.

    Args:
        traffic (`Sequence[Traffic]`):
            What is expected.
        decisions (`Sequence[Decision]`):
            The policy's, for each of them.
        days (`float`):
            For how long the mapper will be of use: until a model of the pair is exchanged.
        fit_seconds (`float`):
            What fitting takes, once.
        validation_seconds (`float`):
            What measuring it takes, as often as that is done in its lifetime.
        concurrency (`int`):
            Requests that wait for each other.
        verdict ([`Verdict`], *optional*):
            What the gate says of the mapper. `None` before there is one.
    """

    traffic: Sequence[Traffic]
    decisions: Sequence[Decision]
    days: float
    fit_seconds: float
    validation_seconds: float
    concurrency: int = 1
    verdict: Verdict | None = None

    @classmethod
    def make(
        cls,
        policy: TransferPolicy,
        traffic: Sequence[Traffic],
        *,
        days: float,
        fit_seconds: float,
        validation_seconds: float,
        verdict: Verdict | None = None,
        effort: float = 0.0,
    ) -> "TransferPlan":
        """
        Ask a policy about each kind of handoff, with an `effort` or without, see [`TransferPlan`].

        Raises:
            `ValueError`: there is no traffic, or a number is out of range.
        """
        if not traffic:
            raise ValueError(
                "`traffic` is empty: name at least one length of context, and how often it is handed over."
            )
        if not days > 0 or not fit_seconds >= 0 or not validation_seconds >= 0:
            raise ValueError(
                f"`days` must be positive, `fit_seconds` and `validation_seconds` 0 or more, got {days}, "
                f"{fit_seconds} and {validation_seconds}."
            )
        decisions = [policy.decide(kind.tokens, effort=effort) for kind in traffic]
        return cls(traffic, decisions, days, fit_seconds, validation_seconds, policy.concurrency, verdict)

    @property
    def handoffs(self) -> float:
        """Contexts over the lifetime for which a handoff is worth it, once there is a mapper."""
        return self.days * sum(
            kind.handoffs_per_day
            for kind, decision in zip(self.traffic, self.decisions, strict=True)
            if decision.choice == "transfer"
        )

    @property
    def saved_seconds(self) -> float:
        """What these save over the lifetime, without what the mapper has cost."""
        return self.days * sum(
            kind.handoffs_per_day * decision.saved_seconds
            for kind, decision in zip(self.traffic, self.decisions, strict=True)
            if decision.choice == "transfer"
        )

    @property
    def days_until_paid(self) -> float | None:
        """After so many days the mapper has saved what it has cost. `None` if it saves nothing."""
        cost = self.fit_seconds + self.validation_seconds
        return cost / self.saved_seconds * self.days if self.saved_seconds > 0 else None

    @property
    def pays(self) -> bool:
        """Whether the mapper saves what it has cost in its lifetime, and may be used at all."""
        admitted = self.verdict is None or self.verdict.admitted
        return admitted and self.days_until_paid is not None and self.days_until_paid <= self.days

    def table(self) -> Table:
        """What is to be weighed, for each length of context."""
        share = 1 / self.handoffs if self.handoffs else 0.0
        rows = []
        for kind, decision in zip(self.traffic, self.decisions, strict=True):
            transfers = decision.choice == "transfer"
            rows.append(
                [
                    f"{kind.tokens:,}",
                    f"{kind.handoffs_per_day:,g}",
                    duration(kind.handoffs_per_day * decision.prefill_seconds),
                    duration(decision.prefill_seconds),
                    duration(decision.handoff_seconds),
                    duration(share * self.fit_seconds) if transfers else "-",
                    duration(share * self.validation_seconds) if transfers else "-",
                    duration(decision.wrong_answer_seconds),
                    "transfer" if transfers and self.pays else "re-prefill",
                ]
            )
        return Table(
            f"Plan for {self.days:g} days",
            [
                "context, tokens",
                "handoffs a day",
                "recompute exposure a day",
                "prefill",
                "handoff",
                "adaptation cost",
                "validation burden",
                "wrong answers",
                "default",
            ],
            rows,
            f"Recompute exposure: what the target's prefills take. Fitting takes {duration(self.fit_seconds)} and "
            f"validation {duration(self.validation_seconds)}; all contexts that are worth a handoff share it.",
        )

    def summary(self) -> str:
        """Whether it is worth it, in a sentence."""
        if self.verdict is not None and not self.verdict.admitted:
            return f"Re-prefill: the gate refuses {self.verdict}"
        if self.days_until_paid is None:
            return "Re-prefill: a handoff saves nothing at these lengths."
        cost = duration(self.fit_seconds + self.validation_seconds)
        paid = f"the mapper takes {cost} and saves as much in {self.days_until_paid:,.1f} days"
        return f"Transfer: {paid}." if self.pays else f"Re-prefill: {paid}, and is used for {self.days:g}."


def duration(seconds: float) -> str:
    """A time, for people."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1000:,.1f} ms" if seconds else "0 s"

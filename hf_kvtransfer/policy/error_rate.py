"""How many answers are wrong because of a handoff, as far as a mapper's evidence tells."""

import statistics
from collections.abc import Sequence
from typing import Any

from ..errors import EvidenceError
from ..fidelity.arms import effort_arms, effort_of
from ..fidelity.report import FidelityReport


def error_rates(report: FidelityReport | None, capabilities: Sequence[str] | None = None) -> dict[float, float]:
    """
    The share of answers that are wrong because of a handoff: its mean, and not a bound, since costs are weighed.

    Of multiple-choice questions it is the share that the target answers right on its own prefill and not on the
    translated cache, less the reverse; of other text the share that is lost of what the context is worth, `1 -
    gap_recovered`, as if each answer hung on the context. Each capability counts as much as another, but for those in
    which the context does not clearly help.

    Args:
        report ([`FidelityReport`], *optional*):
            The evidence. Without it, or if it tells nothing, each answer counts as wrong.
        capabilities (`Sequence[str]`, *optional*):
            Those that count. All by default.

    Returns:
        `dict[float, float]`: For each effort that was measured, 0 the first.

    Raises:
        `EvidenceError`: the report says nothing about one of the capabilities.
    """
    if report is None:
        return {0.0: 1.0}
    figures: Any = report.figures
    if capabilities is not None:
        if unknown := sorted(set(capabilities) - set(figures["capabilities"])):
            raise EvidenceError(
                f"The evidence says nothing about {unknown}, only about {sorted(figures['capabilities'])}."
            )
        figures = report.figures_of(capabilities)
    return {effort_of(arm) or 0.0: _error_rate(figures, arm) for arm in ("translated", *effort_arms(figures["arms"]))}


def _error_rate(figures: Any, arm: str) -> float:
    rates = []
    for name, capability in figures["capabilities"].items():
        gap, questions = capability["arms"][arm]["gap_recovered"], figures["choices"].get(name)
        if questions is not None:
            rates.append(questions["accuracy"]["native"] - questions["accuracy"][arm])
        elif gap is not None:
            rates.append(1 - gap["value"])
    return min(max(statistics.fmean(rates), 0.0), 1.0) if rates else 1.0

"""With which effort a mapper that is refused would be admitted."""

from .arms import effort_arms, effort_of
from .gate import FidelityGate, Verdict
from .report import FidelityReport


def effort_advice(gate: FidelityGate, verdict: Verdict, report: FidelityReport | None) -> str | None:
    """
    What to do about a mapper that is refused for its figures, and for nothing else.

    Args:
        gate ([`FidelityGate`]), verdict ([`Verdict`]):
            Who refuses it.
        report ([`FidelityReport`], *optional*):
            The mapper's evidence.

    Returns:
        `str`: Names the least measured effort with which every threshold is met. `None` if there is none.
    """
    if verdict.admitted or report is None or set(verdict.reasons) - set(gate.judge(report)):
        return None
    for effort in map(effort_of, effort_arms(report.figures["arms"])):
        if effort and not gate.judge(report, effort):
            return f'With `effort={effort:g}`, which `effort="auto"` takes, it is admitted.'
    return None

"""Transfer or re-prefill? From what both have been measured to cost on this machine, and what is lost by the one."""

from .costs import MeasuredCosts
from .measuring import measure_costs
from .plan import Traffic, TransferPlan
from .policy import Decision, TransferPolicy
from .time_model import TimeModel


__all__ = [
    "Decision",
    "MeasuredCosts",
    "TimeModel",
    "Traffic",
    "TransferPlan",
    "TransferPolicy",
    "measure_costs",
]

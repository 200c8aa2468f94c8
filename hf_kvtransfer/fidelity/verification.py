"""What in a report cannot be true: figures that do not come from its results, a curve that is none."""

from collections.abc import Sequence
from typing import Any

from .results import PassageResult, is_number
from .statistics import figures


def disagreement(claimed: Any, results: Sequence[PassageResult]) -> str | None:
    """
    Compare claimed figures with those that results give, without the bootstrap, which is too slow for each loading.

    Args:
        claimed (`dict`):
            As [`figures`] gives them.
        results (`Sequence[PassageResult]`):
            The rows that they are said to come from.

    Returns:
        `str`: The first figure that differs, and how. `None` if none does.

    Raises:
        `EvidenceError`: see [`figures`].
    """
    return _difference("figures", claimed, figures(results, intervals=False))


def probe_problem(probe: Any) -> str | None:
    """What is wrong with a probe's operating curve, `None` if nothing is or there is no probe."""
    if probe is None:
        return None
    points = probe.get("curve") if isinstance(probe, dict) else None
    if not isinstance(points, list) or not _has_numbers(probe, "tokens", "false_alarm_rate", "documents"):
        return "`probe` lacks its curve or one of its numbers"
    for i, point in enumerate(points):
        caught = [point.get(name) for name in ("caught", "caught_by_loss")] if isinstance(point, dict) else [None]
        if not all(
            isinstance(shares, dict) and _has_numbers(shares, *shares) for shares in caught
        ) or not _has_numbers(point, "tokens", "false_alarm_rate", "measured_false_alarms"):
            return f"`probe.curve[{i}]` is {point!r}, not a point of an operating curve"
    return None


def _has_numbers(entries: dict[str, Any], *names: str) -> bool:
    return all(is_number(entries.get(name)) for name in names)


def _difference(name: str, claimed: Any, found: Any) -> str | None:
    if isinstance(found, dict) and isinstance(found.get("value"), float):
        return _share_difference(name, claimed, found["value"])
    if isinstance(found, dict):
        if not isinstance(claimed, dict) or claimed.keys() != found.keys():
            return f"`{name}` does not have the entries {sorted(found)} that the results give"
        return next(filter(None, (_difference(f"{name}.{key}", claimed[key], found[key]) for key in found)), None)
    if isinstance(found, list):
        if not isinstance(claimed, list) or len(claimed) != len(found):
            return f"`{name}` does not have the {len(found)} entries that the results give"
        pairs = zip(claimed, found, strict=True)
        return next(filter(None, (_difference(f"{name}[{i}]", *pair) for i, pair in enumerate(pairs))), None)
    same = _is_close(claimed, found) if isinstance(found, float) else type(claimed) is type(found) and claimed == found
    return None if same else f"`{name}` is {claimed!r}, but the results give {found!r}"


def _share_difference(name: str, claimed: Any, value: float) -> str | None:
    # Whether the denominator is clearly positive is the bootstrap's to say.
    if claimed is None:
        return None
    if not isinstance(claimed, dict) or claimed.keys() != {"value", "low", "high"}:
        return f"`{name}` is {claimed!r}, not a value with an interval"
    if not _is_close(claimed["value"], value):
        return f"`{name}.value` is {claimed['value']!r}, but the results give {value!r}"
    if not is_number(claimed["low"]) or not is_number(claimed["high"]) or claimed["low"] > claimed["high"]:
        return f"`{name}` has an impossible interval, {claimed['low']!r} to {claimed['high']!r}"
    return None


def _is_close(claimed: Any, found: float) -> bool:
    # Sums may be added up in another order by another version of numpy.
    return is_number(claimed) and abs(claimed - found) <= 1e-9 * max(1, abs(found))

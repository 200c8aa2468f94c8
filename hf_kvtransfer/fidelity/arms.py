"""The arms of an evaluation: what they are called, and in which order they are shown."""

from collections.abc import Iterable


# Ways for the target to continue. All but the first two are controls.
ARMS = ("native", "translated", "other_document", "no_context", "raw_source", "random_map")

_NAMES = {
    "native": "its own prefill",
    "translated": "the translated cache",
    "other_document": "a translated cache of another document",
    "no_context": "no context (first tokens only)",
    "raw_source": "the source's cache, not translated",
    "random_map": "a random map of the same shapes",
}
# Of the translated cache, some of whose tokens the target reads again; the share stands behind it.
_EFFORT = "effort "


def effort_arm(effort: float) -> str:
    """The arm of the translated cache with an effort."""
    return f"{_EFFORT}{float(effort)}"


def effort_of(arm: str) -> float | None:
    """The effort of an arm, 0 of the translated cache as it is, `None` if it is another arm."""
    if arm == "translated":
        return 0.0
    try:
        effort = float(arm.removeprefix(_EFFORT)) if arm.startswith(_EFFORT) else 0.0
    except ValueError:
        return None
    return effort if 0 < effort <= 1 and arm == effort_arm(effort) else None


def effort_arms(arms: Iterable[str]) -> list[str]:
    """Those of the translated cache with an effort, the least first."""
    return [effort_arm(effort) for effort in sorted(filter(None, map(effort_of, arms)))]


def arm_at(arms: Iterable[str], effort: float) -> str:
    """What was measured of an effort: the arm with the largest one that is not above it, or without any."""
    return max((arm for arm in arms if (own := effort_of(arm)) is not None and own <= effort), key=effort_of)


def in_order(arms: Iterable[str]) -> list[str]:
    """Those that are arms, as they are shown: native, translated, with one effort after the other, controls."""
    arms = set(arms)
    return [arm for arm in (*ARMS[:2], *effort_arms(arms), *ARMS[2:]) if arm in arms]


def arm_name(arm: str) -> str:
    """What an arm is called where it is shown."""
    return _NAMES.get(arm) or f"the same, effort {effort_of(arm):g}"

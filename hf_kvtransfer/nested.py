"""Nested dicts as flat ones, to compare them entry by entry."""

import reprlib
from typing import Any


def leaves(nested: dict[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """The values of a nested dict under dotted names. `None` has none."""
    flat: dict[str, Any] = {}
    for key, value in (nested or {}).items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def describe_differences(there: dict[str, Any], now: dict[str, Any], most: int = 4) -> str:
    """What has changed from one nested dict to another, for messages; empty if nothing has."""
    there, now = leaves(there), leaves(now)
    differ = [name for name in sorted(there.keys() | now.keys()) if there.get(name) != now.get(name)]
    listed = "; ".join(
        f"{name} was {reprlib.repr(there.get(name))} and is {reprlib.repr(now.get(name))}" for name in differ[:most]
    )
    return f"{listed}; and {len(differ) - most} more" if len(differ) > most else listed

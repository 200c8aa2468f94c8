"""Nested dicts as flat ones, to compare them entry by entry."""

from typing import Any


def leaves(nested: dict[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """The values of a nested dict under dotted names. `None` has none."""
    flat: dict[str, Any] = {}
    for key, value in (nested or {}).items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat

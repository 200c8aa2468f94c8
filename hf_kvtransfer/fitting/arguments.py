"""Numbers that a fit or a training is given."""

import re


BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(BYTES)})")


def check_numbers(**numbers: float) -> None:
    """
    Raises:
        `ValueError`: a number is not positive, or `held_out_every` would hold out everything; names the argument.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"`{name}` must be positive, got {number!r}.")
    if numbers.get("held_out_every", 2) < 2:
        raise ValueError("`held_out_every` must be at least 2, got 1, which leaves no text to fit on.")


def parse_bytes(name: str, size: str | int) -> int:
    """
    The bytes of `45_000_000` or of `"45MB"`, decimal.

    Raises:
        `ValueError`: it is neither; names the argument.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = round(float(match[1]) * BYTES[match[2]]) if match else size
    if type(number) is not int or number <= 0:
        raise ValueError(f"`{name}` must be a positive number of bytes, or like '16GB', got {size!r}.")
    return number

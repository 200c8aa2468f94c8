"""Numbers that a fit or a training is given."""


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

"""cos and sin of a model's first positions, which most contexts stand at, are kept from one context to the next."""

import torch

from ..probe.rotary_call import RotaryCall
from .layout import Columns, compact


_MAX_POSITIONS = 2**13
# Positions that are computed at a time: on the way the module makes several times as many numbers.
_PART = 256


def are_first(position_ids: torch.Tensor) -> bool:
    """Whether they are one row of consecutive positions among the first."""
    if len(position_ids) != 1 or not position_ids.numel() or position_ids.device.type != "cpu":
        return False
    start = int(position_ids[0, 0])
    stop = start + position_ids.shape[1]
    return stop <= _MAX_POSITIONS and torch.equal(position_ids[0], torch.arange(start, stop))


class FirstPositions:
    """
    A model's rotary embedding at its first 8,192 positions, computed as far as it was asked for.

    Args:
        call ([`RotaryCall`]):
            Of a module whose frequencies do not depend on how long a call is.
        columns (`str`):
            How cos and sin of the module are laid out.
    """

    def __init__(self, call: RotaryCall, columns: Columns):
        self._call, self._columns = call, columns
        self._made: tuple[tuple, torch.Tensor, torch.Tensor] | None = None

    def at(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """
        cos and sin, one column for each frequency, `[1, tokens, rotary_dim / 2]`, to be read only. `None` unless
        [`are_first`].
        """
        state, made = self._state(), self._made
        if state is None or not are_first(position_ids):
            return None
        start, stop = int(position_ids[0, 0]), int(position_ids[0, -1]) + 1
        if made is None or made[0] != state or made[1].shape[1] < stop:
            made = self._made = (state, *self._make(max(_PART, 2 ** (stop - 1).bit_length())))
        return made[1][:, start:stop], made[2][:, start:stop]

    def _make(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = [self._call(positions[None]) for positions in torch.arange(length).split(_PART)]
        cos, sin = (torch.cat([compact(part, self._columns) for part in own], 1) for own in zip(*made, strict=True))
        return cos, sin

    def _state(self) -> tuple | None:
        """What the module computes with, `None` if it is not on a CPU."""
        buffers = list(self._call.module.buffers())
        if any(buffer.device.type != "cpu" for buffer in buffers):
            return None
        scalings = [value for value in vars(self._call.module).values() if isinstance(value, float)]
        return (*scalings, *(buffer.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for buffer in buffers))

"""What a device has to give at the moment: memory, and the speed that others leave."""

import time

import psutil
import torch


_REFERENCE_WIDTH = 512
# Long enough to see others who compute at the same time, on any device.
_REFERENCE_SECONDS = 0.02
# A load is believed for so long.
_FRESH_SECONDS = 5.0


def free_memory(device: torch.device) -> int | None:
    """
    Bytes that can be allocated on a device now, `None` if it does not tell. Of a CPU it is what the machine has: a
    container's limit is not seen.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    return psutil.virtual_memory().available


def reference_seconds(device: torch.device) -> float:
    """What one product of two matrices takes on a device now, among whatever else it is computing."""
    matrix = torch.zeros(_REFERENCE_WIDTH, _REFERENCE_WIDTH, device=device)
    for _ in range(2):  # the first one may load a library
        began, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - began < _REFERENCE_SECONDS:
            # Read, so that the device has computed it.
            (matrix @ matrix)[0, 0].item()
            count += 1
    return (time.perf_counter() - began) / count


class LoadMeter:
    """
    How much slower a device is than when something was measured on it.

    Args:
        device (`torch.device`):
            The device.
        reference (`float`):
            What [`reference_seconds`] gave then.
    """

    def __init__(self, device: torch.device, reference: float):
        self.device, self.reference = device, reference
        self._slowdown, self._read = 1.0, -_FRESH_SECONDS

    def slowdown(self) -> float:
        """1 if it is as fast as then, 2 if everything takes twice as long. Measured every few seconds at most."""
        if time.monotonic() - self._read >= _FRESH_SECONDS:
            self._slowdown = reference_seconds(self.device) / self.reference
            self._read = time.monotonic()
        return self._slowdown

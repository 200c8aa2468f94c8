"""The processes that share a fit: each reads a part of the text, and what they have summed is added up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env, reduce
from transformers import PreTrainedModel

from ..errors import CalibrationError


class Processes:
    """
    The processes that `accelerate launch` has started, or this one alone.

    Every process must call the methods in the same order, and gets the same from each.

    Args:
        models (`PreTrainedModel`):
            What each process has for itself.

    Raises:
        `CalibrationError`: a model is spread over the processes (tensor parallelism), so that none can read alone; or
            accelerate does not know that there are several.
    """

    def __init__(self, *models: PreTrainedModel):
        launched = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._state = None
        # Without a launch nothing is initialised: accelerate would settle on a device for the whole program.
        if launched or int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # Of itself it looks for accelerators only, and takes a launch on CPUs for a single process.
            on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
            self._state = PartialState(cpu=on_cpu)
            if self._state.num_processes == 1:
                raise CalibrationError(
                    f"This is one of {os.environ['WORLD_SIZE']} processes, but accelerate was set up for one alone, "
                    "as it is on a machine without accelerators: set ACCELERATE_USE_CPU=1, or begin with "
                    "`Accelerator(cpu=True)`."
                )
        self.count = 1 if self._state is None else self._state.num_processes
        self.index = 0 if self._state is None else self._state.process_index
        for model in models:
            if self.count > 1 and (getattr(model, "tp_size", None) or 1) > 1:
                raise CalibrationError(
                    f"{type(model).__name__} is spread over {model.tp_size} processes, but of the {self.count} "
                    "processes of a fit each reads texts of its own. Load it whole in each, or fit in one process, "
                    "with `device_map`."
                )

    def is_mine(self, number: int) -> bool:
        """Whether the item of a number from 0 on is this process's share."""
        return number % self.count == self.index

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, of the same shape in each. On the CPU."""
        if self.count == 1:
            return tensor
        with self._together():
            return reduce(tensor.to(self._state.device), reduction="sum").cpu()

    def gather(self, value: Any) -> list:
        """What each process has, in their order. To be pickled."""
        if self.count == 1:
            return [value]
        with self._together():
            return gather_object([value])

    def of(self, owner: int, value: Any) -> Any:
        """What one process has. To be pickled."""
        if self.count == 1:
            return value
        with self._together():
            return broadcast_object_list([value], from_process=owner)[0]

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch.distributed, whatever the backend
            raise CalibrationError(
                f"Process {self.index} of {self.count} cannot reach the others ({str(error).splitlines()[0]:.200}): "
                "one of them has ended, and what it printed says why. With a `checkpoint` the same launch goes on "
                "from what each had summed."
            ) from error

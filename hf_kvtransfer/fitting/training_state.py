"""How far a training has come, in memory and on disk."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CalibrationError
from ..nested import describe_differences
from ..whole_files import remove_file, whole_file


FILE_NAME = "distillation.pt"


class TrainingState:
    """
    Parameters in training, the best ones so far, and what else it takes to go on.

    Args:
        folder (`str` or `Path`, *optional*):
            Where the state is kept, and is taken up from. `None` keeps it in memory only.
        parameters (`Sequence[nn.Parameter]`), optimizer (`torch.optim.Optimizer`), schedule (`LRScheduler`):
            What is trained, and by what.
        settings (`dict`):
            What must be the same for a training to go on.

    Raises:
        `CalibrationError`: the folder holds the state of another training, or a damaged one.
    """

    def __init__(
        self,
        folder: str | Path | None,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        settings: dict[str, Any],
    ):
        self.num_steps = 0
        self.history: list[list[float]] = []
        self.best_score = float("inf")
        self._best: list[torch.Tensor] = []
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._parameters, self._optimizer, self._schedule = parameters, optimizer, schedule
        self._settings = json.loads(json.dumps(settings))
        if self._path is not None and self._path.exists():
            self._load(self._path)

    def look(self, score: float) -> None:
        """
        Note a held-out score, the smaller the better, and keep the parameters if none was better.

        Raises:
            `CalibrationError`: the score is NaN or infinite.
        """
        if not math.isfinite(score):
            raise CalibrationError(
                f"The held-out divergence is {score} after {self.num_steps} steps. Load both models in float32 or "
                "bfloat16, or lower `learning_rate`."
            )
        self.history.append([self.num_steps, round(score, 5)])
        if score < self.best_score:
            self.best_score = score
            self._best = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore_best(self) -> None:
        """Set the parameters to those with the best score."""
        for parameter, best in zip(self._parameters, self._best, strict=True):
            parameter.copy_(best)

    def save(self) -> None:
        """Write everything, all of it or none."""
        if self._path is None:
            return
        state = {
            "settings": json.dumps(self._settings),
            "num_steps": self.num_steps,
            "history": self.history,
            "best_score": self.best_score,
            "best": self._best,
            "parameters": [parameter.detach() for parameter in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        with whole_file(self._path) as unfinished:
            torch.save(state, unfinished)

    @torch.no_grad()
    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found = json.loads(state["settings"])
        except Exception as error:  # a damaged pickle can raise anything
            raise CalibrationError(
                f"The checkpoint {path} cannot be read ({error!r:.200}). Delete it to start anew."
            ) from error
        if differences := describe_differences(found, self._settings):
            raise CalibrationError(
                f"The checkpoint {path} is of another training: {differences}. Go on with what it was begun with, or "
                "delete it to start anew."
            )
        self.num_steps, self.history, self.best_score = state["num_steps"], state["history"], state["best_score"]
        for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
        self._best = [best.to(p.device) for best, p in zip(state["best"], self._parameters, strict=True)]
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def remove(self) -> None:
        """The training is done: delete the file."""
        if self._path is not None:
            remove_file(self._path)

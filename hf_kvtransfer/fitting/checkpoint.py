"""What a fit has summed so far, on disk, so that it can go on after an interruption."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from ..errors import CalibrationError
from ..nested import describe_differences
from ..whole_files import remove_file, whole_file
from .processes import Processes
from .text import content_of


logger = logging.get_logger(__name__)

FILE_NAME = "fit.safetensors"
# Of the time of a fit. Sums of a wide pair are gigabytes, which take longer to write than a batch to read.
WRITE_SHARE = 0.05


class Summed(Protocol):
    """Sums that can be written down and gone on from."""

    def state(self) -> dict[str, torch.Tensor]: ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None: ...


class Checkpoint:
    """
    One file for each process, which holds the sums of the stage that a fit is in and how much of the text they are
    made of.

    Args:
        folder (`Path`, *optional*):
            Where the file is, or is going to be. `None` keeps nothing.
        settings (`dict`):
            Everything that the sums depend on, besides the text.
        processes ([`Processes`]):
            Which batches are whose.

    Raises:
        `CalibrationError`: the file is of a fit with other settings, or damaged.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any], processes: Processes):
        name = Path(FILE_NAME)
        if processes.index:
            name = name.with_stem(f"{name.stem}-{processes.index}")
        self._path = None if folder is None else folder / name
        self._processes = processes
        self._settings = json.loads(json.dumps(settings | {"processes": processes.count}))
        self._position: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._last_write, self._write_seconds = time.monotonic(), 0.0
        if self._path is None or not self._path.exists():
            return
        try:
            with safe_open(self._path, framework="pt") as file:
                notes = json.loads(file.metadata()["notes"])
                self._position = notes["position"]
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                found = notes["settings"]
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise CalibrationError(
                f"The checkpoint {self._path} is damaged ({error!r}). Delete it to start anew."
            ) from error
        if differences := describe_differences(found, self._settings):
            raise CalibrationError(
                f"The checkpoint {self._path} is of another fit: {differences}. Go on with what it was begun with, or "
                "delete it to start anew."
            )

    def finished(self, stage: str) -> Any:
        """What an earlier stage has found, if the fit was interrupted behind it, else `None`: as the first process."""
        return self._processes.of(0, self._position.get("results", {}).get(stage))

    def run(
        self, stage: str, batches: Iterable[tuple[bool, list]], sums: Mapping[str, Summed], results: dict[str, Any]
    ) -> Iterator[tuple[bool, list, bool]]:
        """
        The batches of a stage; those that the sums already hold, or that are another process's, are to be counted and
        not read.

        The sums are written before a batch is asked for, so that a batch is either in them or comes again, and when
        there is none left.

        Args:
            stage (`str`):
                Its name.
            batches (`Iterable[tuple[bool, list]]`):
                As [`PairedStates.batches`] gives them.
            sums (`Mapping[str, Summed]`):
                What the caller adds each batch to before it asks for the next.
            results (`dict`):
                What earlier stages have found, JSON-friendly.

        Yields:
            `tuple[bool, list, bool]`: Whether the batch is held out, its texts, and whether it is to be read.

        Raises:
            `CalibrationError`: the texts are other ones than those in the checkpoint, or than another process has.
        """
        resumed = self._position if self._position.get("stage") == stage else {}
        if resumed:
            for name, part in sums.items():
                state = {key.partition(":"): tensor for key, tensor in self._tensors.items()}
                part.load({key: tensor for (owner, _, key), tensor in state.items() if owner == name})
        elif results:
            self._write(stage, 0, "", sums, results)  # what earlier stages have found is not to be lost
        self._tensors = {}
        skipped, number = resumed.get("batches", 0), 0
        digest = hashlib.sha256()
        for number, (held_out, batch) in enumerate(batches, start=1):
            if number - 1 > skipped and time.monotonic() - self._last_write >= self._write_seconds / WRITE_SHARE:
                self._write(stage, number - 1, digest.hexdigest(), sums, results)
            for text in batch:
                digest.update(content_of(text))
            yield held_out, batch, number > skipped and self._processes.is_mine(number - 1)
            if number == skipped and digest.hexdigest() != resumed["digest"]:
                raise self._other_texts(number)
        if number < skipped:
            raise self._other_texts(skipped)
        if number > skipped:
            self._write(stage, number, digest.hexdigest(), sums, results)
        if len(set(self._processes.gather(digest.hexdigest()))) > 1:
            raise CalibrationError(
                f"The {self._processes.count} processes of this fit were given different texts. Give all texts to "
                "each: it reads its share of them."
            )

    def _other_texts(self, batches: int) -> CalibrationError:
        return CalibrationError(
            f"The checkpoint {self._path} holds {batches} batches of other texts. Give the texts that it was begun "
            "with, in the same order, or delete it to start anew."
        )

    def _write(
        self, stage: str, batches: int, digest: str, sums: Mapping[str, Summed], results: dict[str, Any]
    ) -> None:
        if self._path is None:
            return
        start = time.monotonic()
        position = {"stage": stage, "batches": batches, "digest": digest, "results": results}
        notes = json.dumps({"settings": self._settings, "position": position})
        tensors = {f"{name}:{key}": tensor for name, part in sums.items() for key, tensor in part.state().items()}
        try:
            with whole_file(self._path) as unfinished:
                save_file(tensors, unfinished, metadata={"notes": notes})
        except (OSError, SafetensorError) as error:
            # What is summed is in memory: no reason to give it up.
            logger.warning(
                f"The checkpoint {self._path} could not be written ({error}). The fit goes on, and an interruption "
                "would take it back to the one before."
            )
        self._last_write = time.monotonic()
        self._write_seconds = self._last_write - start

    @property
    def states_folder(self) -> Path:
        """Where this process may keep what is too large for the file."""
        assert self._path is not None
        return self._path.with_suffix(".states")

    def remove(self) -> None:
        """The fit is done: delete the file, and what is kept beside it."""
        if self._path is not None:
            remove_file(self._path)
            shutil.rmtree(self.states_folder, ignore_errors=True)

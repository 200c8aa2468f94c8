"""States of both models in files, for sums that have no room in memory all at once."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from ..errors import CalibrationError


# Rows that are taken from the files at once.
_ROWS = 4096


class CapturedStates:
    """
    Rows of [`PairedStates.read`], appended to two files for each block: rows to fit on, and held-out ones.

    They are read back through memory maps, as often as there are groups of target layers.

    Args:
        folder (`Path`):
            Where the files are.
        names (`Sequence[Hashable]`):
            The blocks that are kept.
    """

    def __init__(self, folder: Path, names: Sequence[Hashable]):
        self._folder, self._names = folder, list(names)
        self._num_rows = [0, 0]
        self._columns: dict[Hashable, tuple[int, torch.dtype]] = {}

    @property
    def sums(self) -> dict[str, "CapturedStates"]:
        """For the [`Checkpoint`], in which is noted how much of the files is whole."""
        return {"captured": self}

    @property
    def counts(self) -> tuple[int, int]:
        """Rows to fit on, and held out."""
        return self._num_rows[0], self._num_rows[1]

    def add(self, rows: Mapping, held_out: bool) -> None:
        """
        Append a batch.

        Raises:
            `CalibrationError`: the disk is full, or the files cannot be written.
        """
        count = len(next(iter(rows.values())))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                block = rows[name].contiguous().cpu()
                self._columns[name] = block.shape[1], block.dtype
                with self._open(name, held_out, "ab") as file:
                    file.write(block.view(torch.uint8).numpy().data)
        except OSError as error:
            raise CalibrationError(
                f"States cannot be written to {self._folder} after {sum(self._num_rows)} tokens ({error}). They take "
                f"{self._token_bytes(rows) / 1e3:.1f} kB a token. Make room and give the same call again, which goes "
                "on from here, or lower `max_tokens`."
            ) from error
        self._num_rows[held_out] += count

    def _token_bytes(self, rows: Mapping) -> int:
        return sum(rows[name].shape[1] * rows[name].element_size() for name in self._names)

    def state(self) -> dict[str, torch.Tensor]:
        """How many rows there are, and an empty block of each kind."""
        empty = {
            f"block.{number}": torch.empty(0, width, dtype=dtype)
            for number, (width, dtype) in enumerate(self._columns[name] for name in self._names if self._columns)
        }
        return empty | {"rows": torch.tensor(self._num_rows)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Go on from a [`CapturedStates.state`]: what was written after it is cut off.

        Raises:
            `CalibrationError`: the files hold less.
        """
        self._num_rows = state["rows"].tolist()
        for number, name in enumerate(self._names if sum(self._num_rows) else []):
            block = state[f"block.{number}"]
            self._columns[name] = block.shape[1], block.dtype
            for held_out, count in enumerate(self._num_rows):
                size = count * block.shape[1] * block.element_size()
                with self._open(name, bool(held_out), "ab") as file:
                    found = file.tell()
                    file.truncate(size)
                if found < size:
                    raise CalibrationError(
                        f"The states in {self._folder} have been damaged since the checkpoint was written. Delete "
                        f"{self._folder.parent} to start anew."
                    )

    def rows(self, names: Sequence[Hashable], held_out: bool, device: torch.device) -> Iterator[dict]:
        """Some blocks of all rows, on a device, some thousand rows at a time."""
        count = self._num_rows[held_out]
        if not count:
            return
        mapped = {}
        for name in names:
            width, dtype = self._columns[name]
            file = str(self._path(name, held_out))
            mapped[name] = torch.from_file(file, size=count * width, dtype=dtype).view(count, width)
        for start in range(0, count, _ROWS):
            yield {name: block[start : start + _ROWS].to(device) for name, block in mapped.items()}

    def _path(self, name: Hashable, held_out: bool) -> Path:
        return self._folder / f"{self._names.index(name)}-{'held-out' if held_out else 'train'}.states"

    def _open(self, name: Hashable, held_out: bool, mode: str) -> IO[bytes]:
        return self._path(name, held_out).open(mode)

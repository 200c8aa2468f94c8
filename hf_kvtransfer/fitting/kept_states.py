"""States of both models that are kept from one fit to the next: only the first lets the models read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from ..compat import input_device
from ..identity import ModelIdentity
from ..whole_files import whole_file
from .states import PairedStates, token_blocks
from .text import content_of


logger = logging.get_logger(__name__)

Blocks = dict[Any, torch.Tensor]  # by the names of [`PairedStates`]


class KeptStates(PairedStates):
    """
    [`PairedStates`] that reads a text from files where another fit has let the models read it.

    What the target knows of a token, and of those before it, depends on `native_layers` and `previous_tokens`, and has
    a file of its own; all else is the same for every kind of map.

    Args:
        folder (`Path`):
            Where the files are, or are going to be. Any of them may be deleted between two fits.
        arguments:
            Of [`PairedStates`].
    """

    def __init__(self, folder: Path, *arguments: Any):
        super().__init__(*arguments)
        self._folder, self._keeps = folder, True
        sides = ((self.source, self.source_tokenizer), (self.target, self.target_tokenizer))
        about: dict[str, Any] = {
            "models": [ModelIdentity.from_model(*side).to_dict() for side in sides],
            "dtypes": [str(model.dtype) for model, _ in sides],
            "sink_tokens": self.sink_tokens,
        }
        about_tokens = about | {"tokens": self.native_layers, "previous": self.previous_tokens}
        abouts = [about, about_tokens] if self.token_features else [about]
        self._abouts = [hashlib.sha256(json.dumps(part).encode()).digest() for part in abouts]

    def read(self, batch: list) -> Blocks:
        """As [`PairedStates.read`]."""
        files = [self._files(text) for text in batch]
        texts = [_load(own) for own in files]
        unread = [number for number, blocks in enumerate(texts) if blocks is None]
        if unread:
            rows, counts = self.read_with_counts([batch[number] for number in unread])
            split = {name: block.split(counts) for name, block in rows.items()}
            for place, number in enumerate(unread):
                blocks = {name: parts[place] for name, parts in split.items()}
                texts[number] = blocks
                if self._keeps:
                    self._save(files[number], blocks)
        device = input_device(self.target)
        return {name: torch.cat([blocks[name].to(device) for blocks in texts]) for name in texts[0]}

    def _files(self, text: str | torch.Tensor) -> list[Path]:
        names = (hashlib.sha256(about + content_of(text)).hexdigest() for about in self._abouts)
        return [self._folder / f"{name}.safetensors" for name in names]

    def _save(self, files: list[Path], blocks: Blocks) -> None:
        states = {_name(block): part.contiguous().cpu() for block, part in blocks.items()}
        names = token_blocks(self.previous_tokens) if self.token_features else []
        tokens = {_name(name): states.pop(_name(name)) for name in names}
        try:
            for file, tensors in zip(files, (states, tokens), strict=False):
                if not file.exists():
                    with whole_file(file) as unfinished:
                        save_file(tensors, unfinished)
        except (OSError, SafetensorError) as error:
            self._keeps = False  # the fit itself needs none of them
            logger.warning(f"No more states are kept in {self._folder}: {error}.")


def _name(block: Any) -> str:
    return block if isinstance(block, str) else ".".join(map(str, block))


def _load(files: list[Path]) -> Blocks | None:
    """The blocks of a text, `None` if a file is not there, or cannot be read and is thus to be written anew."""
    blocks: Blocks = {}
    for file in files:
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError):
            file.unlink(missing_ok=True)
            return None
        blocks |= {_block(name): states for name, states in tensors.items()}
    return blocks


def _block(name: str) -> str | tuple[str, int]:
    side, _, layer_idx = name.partition(".")
    return (side, int(layer_idx)) if layer_idx else name

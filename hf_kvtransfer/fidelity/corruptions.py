"""Translations that are wrong in known ways, to measure what the probe catches."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..maps.base import LayerMap
from ..source import SourceKV
from ..translation import Translation
from .altered_maps import with_maps
from .tail_reading import MAX_PROBE_TOKENS


CORRUPTIONS = (
    "other_document",
    "other_beginning",
    "shuffled_tokens",
    "noisy_layer",
    "swapped_layers",
    "stale_mapper",
    "wrong_positions",
)
# How far a stale mapper's keys and values are off, relative to their size.
STALENESS = 0.5


def corruptions(translation: Translation, other: SourceKV, seed: int = 0) -> Iterator[tuple[str, Translation]]:
    """
    Plant corruptions in a translation. The tokens that the target has read itself, the layers that it computes itself
    (native ones) and the text stay right.

    - `other_document`: the states of another document stand behind this one's tokens.
    - `other_beginning`: the same, but the tokens that a probe may read have their own states.
    - `shuffled_tokens`: the source's tokens are in another order.
    - `noisy_layer`: to one mapped layer's states noise of their own size is added.
    - `swapped_layers`: two mapped layers of the same shape have each other's maps.
    - `stale_mapper`: all mapped layers' keys and values are off by half their size, by a fixed linear function of
      themselves, as after an update of a model's weights.
    - `wrong_positions`: the two halves of the context stand at each other's positions.

    Args:
        translation ([`Translation`]):
            The right one. It is not changed.
        other ([`SourceKV`]):
            What the source has read of another document, with as many rows.
        seed (`int`, *optional*, defaults to 0):
            Of everything that is drawn at random.

    Yields:
        `tuple[str, Translation]`: Name of the corruption, one of [`CORRUPTIONS`], and the corrupted translation.
        `swapped_layers` is left out where no two mapped layers have the same shape, and all of them where the target
        computes every layer itself: nothing of it can be wrong.
    """
    source_kv, mapper = translation.source_kv, translation.mapper
    mapped = mapper.config.mapped_layers
    if not mapped:
        return
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(len(source_kv)) % len(other)
    yield "other_document", _with_states(translation, other, tokens)
    last = translation.source_index[0, max(translation.length - MAX_PROBE_TOKENS - 1, 0)]
    yield "other_beginning", _with_states(translation, other, tokens[: last + 1])
    yield "shuffled_tokens", _with_states(translation, source_kv, torch.randperm(len(source_kv), generator=generator))

    maps, layers = list(mapper.layers), translation.geometry.layers
    noisy = mapped[int(torch.randint(len(mapped), (), generator=generator))]

    def add_noise(states: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed)).to(states)
        return states + noise * states.float().pow(2).mean().sqrt().to(states.dtype)

    yield "noisy_layer", _with_maps(translation, {noisy: _Off(maps[noisy], layers[noisy].widths, [add_noise] * 2)})

    pairs = [(i, j) for i in mapped for j in mapped if i < j and layers[i].widths == layers[j].widths]
    if pairs:
        first, second = pairs[int(torch.randint(len(pairs), (), generator=generator))]
        yield "swapped_layers", _with_maps(translation, {first: maps[second], second: maps[first]})

    def add_linear(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        matrix = STALENESS / width**0.5 * torch.randn(width, width, generator=generator)
        return lambda states: states + states @ matrix.to(states)

    stale = {i: _Off(maps[i], layers[i].widths, [add_linear(width) for width in layers[i].widths]) for i in mapped}
    yield "stale_mapper", _with_maps(translation, stale)

    moved = copy.copy(translation)
    length = max(translation.length, 1)
    moved.key_positions = (translation.position_ids + length // 2) % length
    yield "wrong_positions", moved


def _with_states(translation: Translation, states: SourceKV, tokens: torch.Tensor) -> Translation:
    """The same request, with the states of these tokens in place of its own first ones."""
    source_kv = copy.copy(translation.source_kv)
    source_kv.features = [
        None if f is None else torch.cat([f[:, tokens.to(f.device)], own[:, len(tokens) :]], 1)
        for f, own in zip(states.features, source_kv.features, strict=True)
    ]
    corrupted = copy.copy(translation)
    corrupted.source_kv = source_kv
    return corrupted


def _with_maps(translation: Translation, maps: Mapping[int, nn.Module]) -> Translation:
    """The same request, with other maps for some layers."""
    mapper = translation.mapper
    return translation.with_mapper(with_maps(mapper, [maps.get(i, kept) for i, kept in enumerate(mapper.layers)]))


class _Off(LayerMap):
    """A layer map whose keys go through the first of two changes, and its values through the second."""

    def __init__(
        self,
        layer_map: Any,
        widths: tuple[int, int],
        changes: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ):
        super().__init__()
        self.layer_map, self.source_layers = layer_map, layer_map.source_layers
        self.previous_tokens = layer_map.previous_tokens
        self.widths, self.changes = widths, changes

    def forward(self, *features) -> torch.Tensor:
        parts = self.layer_map(*features).split(self.widths, -1)
        return torch.cat([change(part) for change, part in zip(self.changes, parts, strict=True)], -1)

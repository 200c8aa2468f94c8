"""`effort`: how much of a translated context the target reads again, between all of it translated and a prefill."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from .errors import BatchMismatchError
from .geometry import KVGeometry
from .layers import FilledTranslator, LayerTranslator, install
from .mapper import KVMapper
from .native_states import read_first_layers
from .question_attention import question_attention
from .rereading import reread
from .segments.joined import SegmentedTranslation
from .translation import Translation


# Tokens before one that is attended to ("Ilse Maren lives in" before a town), each with half the score of the next.
_NUM_BEFORE = 6
# A token that deviates by less than this share of the mean is right: rounding in bfloat16 stays below.
_RIGHT = 1e-3

# A share, or the least one that the gate admits.
Effort = float | Literal["auto"]


def check_effort(effort: float | str, may_be_auto: bool = False) -> None:
    """Raise `ValueError` if it is no share, nor `"auto"` where it may be."""
    if may_be_auto and effort == "auto":
        return
    if isinstance(effort, str) or not 0 <= effort <= 1:
        auto = ', or "auto"' if may_be_auto else ""
        raise ValueError(
            "`effort` must be between 0, where all is translated, and 1, where the target reads it all"
            f"{auto}, got {effort!r}."
        )


def check_efforts(efforts: Sequence[float]) -> None:
    """
    Check efforts to measure.

    Raises:
        `ValueError`: one is 0, which is always measured, or no share, or is there twice.
    """
    for effort in efforts:
        check_effort(effort)
        if not effort:
            raise ValueError("`efforts` holds 0, which is the translated cache as it is: it is always measured.")
    if len(set(efforts)) < len(efforts):
        raise ValueError(f"`efforts` must be different ones, got {list(efforts)}.")


def read_again(
    translation: Translation | SegmentedTranslation, translator: LayerTranslator, effort: float, last: int = 0
) -> tuple[LayerTranslator, torch.Tensor]:
    """
    Let the target read some of the tokens again: those that what follows attends to, or that are worst translated.

    It reads all of the context with its first layers only, up to the first one that is translated and stands behind an
    attention. What it makes of the tokens there says which of them are far from what a prefill gives, and stays in
    place of the translation in these layers. The chosen tokens then go through all layers.

    Where the prompt is known to go on behind the context, its end is read on top of the translation, and the tokens
    are chosen that the last one attends to, with a few before each of them, in which its meaning has come about. Those
    that the first layers find right already are passed over: in chunks at new positions, the first chunk. Where no
    question is known, or attention cannot be listened to, those are chosen that the first layers find furthest off.

    Args:
        translation ([`Translation`] or [`SegmentedTranslation`]):
            Of rows without padding.
        translator (`LayerTranslator`):
            What the cache would be made of without: the translation, or what has been read on top of it too.
        effort (`float`):
            Share of the tokens from the first translated one on.
        last (`int`, *optional*, defaults to 0):
            So many of the last tokens are read again in any case.

    Returns:
        `tuple[LayerTranslator, torch.Tensor]`: What the cache is to be made of, and which tokens the target has read
        now, `[batch, length]`.

    Raises:
        `BatchMismatchError`: rows are padded.
        `UnsupportedModelError`: see [`reread`].
    """
    length, translated = translation.length, translation.translated_mask
    read = torch.zeros_like(translated)
    if not translated.any():
        return translator, read
    if not translation.attention_mask.all():
        raise BatchMismatchError(
            "With `effort`, rows must be without padding, but they differ in length. Make a cache for each row, group "
            "rows of one length, or leave `effort` at 0."
        )
    first = int(translated.any(0).long().argmax())
    chosen = math.ceil(effort * (length - first))
    if chosen >= length - first:
        return FilledTranslator(translation, translation.prefill()), translation.attention_mask.bool()
    cache = DynamicCache(config=translation.target.config)
    cache.activate_past_recording()
    own_layers = list(cache.layers)
    install(cache, translator)
    check_layer = find_check_layer(translation.geometry, [segment.mapper for segment in translation.segments])
    native = read_first_layers(translation.target, translation.input_ids, num_layers=check_layer).keys_and_values
    for layer_idx, states in enumerate(native):
        if states is not None:
            own_layers[layer_idx].update(*states)
            cache.layers[layer_idx] = own_layers[layer_idx]
    scores = _deviations(translator, check_layer, native[check_layer])
    asked_for = question_attention(translation.target, cache, translation.prompt_ids)
    if asked_for is not None:
        right = scores <= _RIGHT * scores.mean(1, keepdim=True)
        scores = _with_those_before(asked_for.masked_fill(right, 0.0)) - right.float()
    scores[:, :first] = -torch.inf
    scores[:, length - last :] = torch.inf
    positions = scores.topk(max(chosen, last), dim=1).indices.sort().values
    reread(translation.target, cache, translation.input_ids, positions)
    return FilledTranslator(translation, cache), read.scatter(1, positions, True)


def _with_those_before(scores: torch.Tensor) -> torch.Tensor:
    """For each token its score, or a share of one close behind it, `[batch, length]`."""
    behind = pad(scores, (0, _NUM_BEFORE)).unfold(1, _NUM_BEFORE + 1, 1)  # [batch, length, places from the token on]
    return (behind / 2 ** torch.arange(_NUM_BEFORE + 1)).amax(-1)


def find_check_layer(geometry: KVGeometry, mappers: Sequence[KVMapper]) -> int:
    """The first layer of a target whose keys and values depend on the context, and are translated."""
    native = [mapper.config.native_layers for mapper in mappers]
    first = 1 + max((layers for layers in native if layers is not None), default=0)
    caching = [i for i, layer in enumerate(geometry.layers) if layer is not None]
    return min((i for i in caching if i >= first), default=caching[-1])


def _deviations(
    translator: LayerTranslator, layer_idx: int, native: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """How far each token's keys and values in one layer are from the target's own, `[batch, length]`, on the CPU."""
    given = translator.layer(layer_idx, 0, translator.length, native[0].device, native[0].dtype)
    total = torch.zeros(native[0].shape[0], translator.length)
    for own, other in zip(native, given, strict=True):
        own, other = own.float(), other.float()
        total += ((own - other).square().sum((1, 3)) / own.square().sum((1, 3)).mean()).cpu()
    return total

"""The probe's reading: the target reads the end of the context itself, on top of what was translated."""

import dataclasses
import math

import torch
from transformers import DynamicCache

from ..compat import read_into_cache, token_losses
from ..layers import LayerTranslator, install
from ..translation import Translation


# Numbers of tokens that a probe may read; the more, the more is caught and the longer it takes.
PROBE_TOKENS = (8, 16, 32)
MAX_PROBE_TOKENS = max(PROBE_TOKENS)


@dataclasses.dataclass(frozen=True)
class TailReading:
    """
    How one row's tail agrees with what was translated.

    Args:
        losses (`list[float]`):
            The target's loss on each token, in nats.
        source_losses (`list[float]`, *optional*):
            What the source lost on the same text, spread over the target's tokens. `None` if its losses are not known.
        state_errors (`list[list[float]]`):
            How far what the target caches of the tail is from what the mapper makes of the same tokens: for each of
            [`PROBE_TOKENS`] that was read, for keys and values of each layer that is mapped, the logarithm of
            `|native - mapped|**2 / |native|**2` over the first so many tokens.
    """

    losses: list[float]
    source_losses: list[float] | None
    state_errors: list[list[float]]


def read_tail(
    translation: Translation, num_tokens: int, below: LayerTranslator | None = None
) -> tuple[list[TailReading], DynamicCache]:
    """
    Let the target read the last tokens of a translation natively, on top of the rest.

    Args:
        translation ([`Translation`]):
            Of a context of more than `num_tokens` tokens.
        num_tokens (`int`):
            Tokens to read.
        below (`LayerTranslator`, *optional*):
            What stands below them where the translation is only the end of it; by default the translation.

    Returns:
        `tuple[list[TailReading], DynamicCache]`: One reading for each row, of as many losses as tokens were read (one
        less if the token behind the translation is not known), and the filled cache.
    """
    start = translation.length - num_tokens
    mask = translation.attention_mask
    cache = DynamicCache(config=translation.target.config)
    if any(
        layer and layer.sliding_window and layer.sliding_window <= num_tokens for layer in translation.geometry.layers
    ):
        cache.activate_past_recording()  # a window shorter than the tail would not hold it
    install(cache, translation if below is None else below, start)
    logits = read_into_cache(
        translation.target,
        cache,
        translation.input_ids[:, start:],
        num_logits=num_tokens,
        attention_mask=None if mask.all() else mask,
        position_ids=translation.position_ids[:, start:],
    )
    following = translation.known_ids[:, start + 1 : translation.length + 1].to(logits.device)
    losses = token_losses(logits[:, : following.shape[1]], following)
    source_losses = _source_losses(translation, start + 1, start + 1 + following.shape[1])
    state_errors = _state_errors(translation, cache, start)
    readings = [TailReading(*row) for row in zip(losses.tolist(), source_losses, state_errors, strict=True)]
    return readings, cache


def _source_losses(translation: Translation, start: int, stop: int) -> list[list[float] | None]:
    """For each row what the source lost on the text of the target's tokens `start` to `stop`."""
    losses = translation.source_kv.token_losses
    if losses is None:
        return [None] * translation.batch_size
    # The source tokens behind the one that speaks for the token before, up to the one that speaks for this one.
    places = translation.source_index[:, start - 1 : stop] + 1
    total = torch.nn.functional.pad(losses.double().nan_to_num(nan=0).cumsum(1), (1, 0)).gather(1, places)
    unknown = torch.nn.functional.pad(losses.isnan().long().cumsum(1), (1, 0)).gather(1, places)
    return [
        None if row_unknown[-1] > row_unknown[0] else row.diff().tolist()
        for row, row_unknown in zip(total, unknown, strict=True)
    ]


def _state_errors(translation: Translation, cache: DynamicCache, start: int) -> list[list[list[float]]]:
    """For each row, number of tokens, and keys and values of each layer, see [`TailReading`]."""
    num_tokens = translation.length - start
    lengths = torch.tensor([length for length in PROBE_TOKENS if length <= num_tokens])
    columns = []
    for layer_idx in translation.mapper.config.mapped_layers:
        held = cache.layers[layer_idx]
        native = [states[:, :, -num_tokens:] for states in (held.keys, held.values)]
        mapped = translation.layer(layer_idx, start, translation.length, native[0].device, native[0].dtype)
        for own, other in zip(native, mapped, strict=True):
            own, other = own.float(), other.float()
            # Squares, summed over heads and dimensions, then over the first so many tokens.
            error, size = (x.square().sum((1, 3)).cumsum(1).cpu()[:, lengths - 1] for x in (own - other, own))
            columns.append((error / size.clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1e-12).log())
    errors = torch.stack(columns, -1) if columns else torch.empty(translation.batch_size, len(lengths), 0)
    return torch.where(errors.isfinite(), errors, math.log(1e12)).tolist()

"""One request: a source's keys and values, a mapper and a target, bound and checked. Knows both models."""

import copy
import time
from typing import Any, Self

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .adapters import TargetAdapters
from .alignment import TokenAlignment, align_tokens
from .alignment.spans import character_spans, encode_with_spans
from .blockwise_maps import BlockwiseMaps
from .compat import input_device, model_name
from .errors import (
    AlignmentError,
    BatchMismatchError,
    PrefixMismatchError,
)
from .first_tokens import FirstTokens, read_first_tokens
from .geometry import KVGeometry
from .mapper import KVMapper
from .padding import pad_rows, positions_from_mask, unpad_rows
from .pair import check_pair
from .rotary import Rotary
from .source import SourceKV
from .target_tokens import TargetTokens


# Below this share of target tokens with source text behind them the two sides do not stand for the same context.
MIN_COVERAGE = 0.5


def check_not_negative(**numbers: int | None) -> None:
    """Raise `ValueError`, naming the argument, if a number is below 0."""
    for name, number in numbers.items():
        if number is not None and number < 0:
            raise ValueError(f"`{name}` must be 0 or more, got {number}.")


class Translation(BlockwiseMaps):
    """
    Answers `layer(layer_idx, start, stop, device, dtype)` with one target layer's keys and values.

    Nothing about the context is computed when it is made, but the target has read the context's first tokens: they
    serve every later query as attention sinks, their keys and values are outliers that no linear map renders well.
    With a mapper that has native layers, the first call of `layer` lets the target's first layers read the context.
    Their keys and values, and the hidden states that the other maps read, are held as long as the translation is.

    Args:
        source_kv (`SourceKV`):
            What the source read.
        mapper (`KVMapper`):
            Fitted for this pair.
        target (`PreTrainedModel`):
            The model that will continue.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Needed if the models' tokenizers differ.
        input_ids (`torch.LongTensor`, *optional*):
            The target's ids of the prompt, `[batch, tokens]`, left-padded. What the source has read of it is
            translated. By default the source's text through the target's tokenizer.
        attention_mask (`torch.LongTensor`, *optional*):
            Goes with `input_ids`.
        sink_tokens (`int`, *optional*):
            First tokens of each row that the target reads itself, by default as in the mapper's fit.
        tail_tokens (`int`, *optional*, defaults to 1):
            Last tokens that are held back, for the target to read.

    Raises:
        `PairMismatchError`, `TokenizerMismatchError`, `AlignmentError`, `BatchMismatchError`, `UnsupportedModelError`
    """

    def __init__(
        self,
        source_kv: SourceKV,
        mapper: KVMapper,
        target: PreTrainedModel,
        *,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        sink_tokens: int | None = None,
        tail_tokens: int = 1,
    ):
        check_not_negative(sink_tokens=sink_tokens, tail_tokens=tail_tokens)
        self._bind(source_kv, mapper, target, target_tokenizer)

        rows, alignments = self._align(target_tokenizer, input_ids, attention_mask)
        all_ids, mask = pad_rows(rows)
        width = all_ids.shape[1]
        # Columns of the padded batch up to which the source can speak for each row.
        ends = [width - len(row) + alignment.last_aligned + 1 for row, alignment in zip(rows, alignments, strict=True)]
        read = [alignment[: alignment.last_aligned + 1] for alignment in alignments]
        coverage = sum(alignment.coverage for alignment in read) / len(read)
        if coverage < MIN_COVERAGE:
            raise AlignmentError(
                f"Only {coverage:.0%} of the target's tokens are text that the source has read, at least "
                f"{MIN_COVERAGE:.0%} are needed. Check that the prompt holds the source's context, or let the target "
                "prefill."
            )
        known = max(min(ends), 0)
        self.length = max(known - tail_tokens, 0)
        self.prompt_ids = all_ids
        # The prompt as far as every row's source has read it: the cache's tokens, and those that are held back.
        self.known_ids = all_ids[:, :known]
        self.input_ids, self.attention_mask = all_ids[:, : self.length], mask[:, : self.length]
        self.position_ids = positions_from_mask(self.attention_mask)
        self.key_positions = self.position_ids

        # Padding listens to whatever stands in its column.
        index = torch.arange(known).clamp(max=len(source_kv) - 1).repeat(self.batch_size, 1)
        first_source = len(source_kv) - source_kv.attention_mask.sum(-1)
        for i, (row, alignment) in enumerate(zip(rows, alignments, strict=True)):
            first = min(width - len(row), known)
            index[i, first:] = alignment.source_index[: known - first] + first_source[i]
        self.source_index = index
        # One token of the source for each of the target's, in the same columns: nothing is to be gathered.
        self._in_step = bool((index == torch.arange(known)).all())

        sink_tokens = mapper.config.sink_tokens if sink_tokens is None else sink_tokens
        self._first_token = self.length - self.attention_mask.sum(-1)
        self.num_sinks = min(sink_tokens, self.length - int(self._first_token.max())) if self.length else 0
        self._sinks = self._read_sinks()
        self._target_tokens = TargetTokens(target, self.input_ids, self.attention_mask, self.position_ids)
        self.layer_seconds: dict[int, float] = {}

        self.held_back_tokens = sum(ends) - self.length * self.batch_size
        self.coverage = coverage
        self.boundary_share = sum(alignment.boundary_share for alignment in read) / len(read)

    def _bind(
        self,
        source_kv: SourceKV,
        mapper: KVMapper,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.source_kv, self.mapper, self.target = source_kv, mapper, target
        self.geometry = KVGeometry.from_model(target)
        self._rotary = Rotary.from_model(target)  # refuses by name what has keys and values in shape only
        self._last_block = {}
        check_pair(mapper, source_kv, target, self.geometry, target_tokenizer)
        self._adapters = TargetAdapters(target)

    @property
    def segments(self) -> tuple["Translation", ...]:
        """As of a translation of several: what maps some of the tokens, in order."""
        return (self,)

    @property
    def reasons(self) -> tuple[str, ...]:
        """As of a translation of several: why there are not more of them."""
        return ()

    @property
    def source_tokens(self) -> int:
        """Tokens that the source has read, of all rows."""
        return int(self.source_kv.attention_mask.sum())

    @property
    def mapped_tokens(self) -> int:
        """Tokens of the shortest row that are mapped, and not read by the target."""
        return int(self.attention_mask.sum(-1).min()) - self.num_sinks

    @property
    def translated_mask(self) -> torch.Tensor:
        """Which tokens are mapped, `[batch, length]`: all but padding and sinks."""
        return self.attention_mask.bool() & (self.attention_mask.cumsum(-1) > self.num_sinks)

    @property
    def default_placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype for whoever reads a layer before the target has asked for it."""
        return input_device(self.target), self.target.dtype

    @property
    def description(self) -> str:
        """Mapper, models and what these cache, for messages."""
        return (
            f"mapper {self.mapper.name}, from {self.source_kv.identity.name} "
            f"({self.source_kv.geometry.describe()}) to {model_name(self.target)} ({self.geometry.describe()})"
        )

    def with_mapper(self, mapper: KVMapper) -> "Translation":
        """
        The same request through another mapper of the same geometry; alignment and native tokens are shared, and
        native layers if it has as many of them.
        """
        other = copy.copy(self)
        other.mapper, other.layer_seconds = mapper, {}
        return other

    def only(self, layer_idx: int) -> Self:
        """The same request for one layer, which holds no source layer but those that its map reads."""
        other = copy.copy(self)
        layer_map: Any = self.mapper.layers[layer_idx]
        other.source_kv = self.source_kv.only(layer_map.source_layers)
        return other

    def __deepcopy__(self, memo) -> "Translation":
        # Bound once and never changed: copies of a cache share the mapper, the models and the source.
        return self

    def layer(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Translate a range of tokens for one layer.

        Args:
            layer_idx (`int`):
                The target's layer.
            start (`int`), stop (`int`):
                Range of the target's tokens, padding included.
            device (`torch.device`), dtype (`torch.dtype`):
                Where and as what the target's attention wants them.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys with the target's rotary embedding applied, and values, each
            `[batch, heads, stop - start, head_dim]`.
        """
        began = time.perf_counter()
        native_layers = self.mapper.config.native_layers
        if native_layers is not None and layer_idx <= native_layers and start < stop:
            self._check_native_layers(native_layers)
            native = self._target_tokens.keys_and_values(start, stop, native_layers, layer_idx)
            keys, values = (states.to(device, dtype) for states in native)
        else:
            keys, values = self._translate(layer_idx, start, stop, device, dtype)
        self.layer_seconds[layer_idx] = self.layer_seconds.get(layer_idx, 0.0) + time.perf_counter() - began
        return keys, values

    def _translate(
        self, layer_idx: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`Translation.layer`], for a layer that has a map: mapped tokens, and the sinks among them."""
        layer = self.geometry.layers[layer_idx]
        heads, tokens = layer.num_key_value_heads, stop - start
        keys = torch.empty(self.batch_size, heads, tokens, layer.key_head_dim, device=device, dtype=dtype)
        values = torch.empty(self.batch_size, heads, tokens, layer.value_head_dim, device=device, dtype=dtype)
        # Without padding the sinks are the first columns, and the map need not render them.
        mapped = start if self._first_token.any() else min(max(start, self.num_sinks), stop)
        self._map_range(layer_idx, mapped, stop, keys[:, :, mapped - start :], values[:, :, mapped - start :])
        for row, first in enumerate(self._first_token.tolist()):
            begin, end = max(first, start), min(first + self.num_sinks, stop)
            if begin < end:
                for states, sinks in zip((keys, values), self._sinks[layer_idx], strict=True):
                    states[row, :, begin - start : end - start] = sinks[row, :, begin - first : end - first]
        return keys, values

    def prefill(self) -> DynamicCache:
        """What the target caches when it reads the tokens itself, every one of them also in sliding windows."""
        return self._target_tokens.prefill(self.length)

    def check_target(self) -> None:
        """Raise [`PairMismatchError`] if the target's adapters were switched since the request was bound."""
        self._adapters.check()

    def _align(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], list[TokenAlignment]]:
        """The target's token ids of each row, without padding, and which source token speaks for each of them."""
        source = self.source_kv
        prompts = None if input_ids is None else unpad_rows(input_ids, attention_mask)
        if prompts is not None and len(prompts) != source.batch_size:
            raise BatchMismatchError(
                f"`input_ids` has {len(prompts)} rows, the source has read {source.batch_size}. Pass one prompt for "
                "each row; `generate` repeats the cache for beams and `num_return_sequences` itself."
            )
        rows, alignments = [], []
        one_to_one = self.mapper.config.source["tokenizer"] == self.mapper.config.target["tokenizer"]
        for i, source_row in enumerate(unpad_rows(source.input_ids, source.attention_mask)):
            row = source_row if prompts is None else prompts[i]
            if one_to_one:
                common = min(len(row), len(source_row))
                differs = (row[:common] != source_row[:common]).nonzero()
                common = int(differs[0]) if len(differs) else common
                if not common:
                    raise PrefixMismatchError(
                        f"Row {i} of `input_ids` starts with {row[:8].tolist()}, the source has read "
                        f"{source_row[:8].tolist()}. Start the prompt with the source's context."
                    )
                alignment = TokenAlignment.identity(common)
            else:
                if prompts is None:
                    ids, spans = encode_with_spans(tokenizer, source.text[i])
                    row, text = torch.tensor(ids), source.text[i]
                else:
                    text, spans = character_spans(tokenizer, row.tolist())
                alignment = align_tokens(source.text[i], source.row_spans(i), text, spans)
            rows.append(row)
            alignments.append(alignment)
        return rows, alignments

    def _read_sinks(self) -> FirstTokens:
        """Let the target read each row's first tokens, which stand at positions 0 and up whatever the padding."""
        if not self.num_sinks:
            return [None] * len(self.geometry.layers)
        columns = self._first_token[:, None] + torch.arange(self.num_sinks)
        return read_first_tokens(self.target, self.input_ids.gather(1, columns))

"""Calibration text read by both models: rows of features and of what they should become."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..alignment import align_tokens
from ..alignment.spans import encode_with_spans
from ..compat import input_device
from ..errors import CalibrationError
from ..native_states import AttentionInput
from ..padding import pad_rows
from ..source import SourceKV
from .round_trip import round_trips


# Batches are filled with texts of similar length out of this many batches, so that little is computed for padding.
SORTING_WINDOW = 16

TOKENS = "tokens"


def token_blocks(previous_tokens: int) -> list[Hashable]:
    """Names of the blocks of token features: of each token, of the one before it, and so on."""
    return [TOKENS, *((TOKENS, distance) for distance in range(1, previous_tokens + 1))]


class PairedStates:
    """
    Reads text with both models and lines up their states, token by token.

    Blocks of rows are named `("source", layer_idx)`, `("target", layer_idx)` and `"tokens"`, what the target itself
    knows of a token before its mapped layers: its embedding, or what native layers make of it. `("tokens", 1)` is what
    it knows of the token before each token, and so on; before the first token of a text stands that token itself.

    Args:
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers, both `None` for texts that are token ids.
        token_features (`bool`):
            Whether to give `"tokens"`.
        sink_tokens (`int`):
            First target tokens of each text that are left out.
        max_length (`int`):
            Target tokens to which texts are cut.
        native_layers (`int`, *optional*):
            `"tokens"` is the input of this target layer's attention. By default it is the target's embedding.
        previous_tokens (`int`, *optional*, defaults to 0):
            How many blocks of tokens before each token to give.

    Raises:
        `ValueError`: the target has no layer `native_layers` that caches keys and values.
    """

    def __init__(
        self,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase | None,
        target_tokenizer: PreTrainedTokenizerBase | None,
        token_features: bool,
        sink_tokens: int,
        max_length: int,
        native_layers: int | None = None,
        previous_tokens: int = 0,
    ):
        self.source, self.target = source, target
        self.source_tokenizer, self.target_tokenizer = source_tokenizer, target_tokenizer
        self.token_features, self.sink_tokens, self.max_length = token_features, sink_tokens, max_length
        self.native_layers, self.previous_tokens = native_layers, previous_tokens
        self._attention_input = None if native_layers is None else AttentionInput(target, native_layers)

    def batches(self, texts: Iterable, batch_size: int, held_out_every: int) -> Iterator[tuple[bool, list]]:
        """
        Texts cut to `max_length`, in batches of similar length that are held out as a whole or not at all.

        Args:
            texts (`Iterable`):
                Strings or token ids. Those too short to leave a row are dropped.
            batch_size (`int`):
                Texts in a batch.
            held_out_every (`int`):
                Each how-manieth text is held out.

        Yields:
            `tuple[bool, list]`: Whether the batch is held out, and its texts.
        """
        windows: dict[bool, list] = {False: [], True: []}
        for number, text in enumerate(texts, start=1):
            cut, length = self.cut(text)
            window = windows[number % held_out_every == 0]
            if length > self.sink_tokens:
                window.append((length, cut))
            if len(window) == SORTING_WINDOW * batch_size:
                yield from self._sorted_batches(windows, batch_size)
        yield from self._sorted_batches(windows, batch_size)

    @staticmethod
    def _sorted_batches(windows: dict[bool, list], batch_size: int) -> Iterator[tuple[bool, list]]:
        for held_out, window in windows.items():
            ordered = [text for _, text in sorted(window, key=lambda item: item[0])]
            for start in range(0, len(ordered), batch_size):
                yield held_out, ordered[start : start + batch_size]
            window.clear()

    def cut(self, text: str | Sequence[int] | torch.Tensor) -> tuple[str | torch.Tensor, int]:
        """A text cut to `max_length` target tokens, and how many it then has."""
        if self.target_tokenizer is None:
            if isinstance(text, str):
                raise CalibrationError("`texts` are strings: pass `source_tokenizer` (and `target_tokenizer`).")
            token_ids = torch.as_tensor(text)[: self.max_length]
            return token_ids, len(token_ids)
        if not isinstance(text, str):
            raise CalibrationError(
                f"`texts` must be strings when there are tokenizers, got an item of type {type(text).__name__}."
            )
        ids, spans = encode_with_spans(self.target_tokenizer, text)
        if len(ids) > self.max_length:
            return text[: spans[self.max_length - 1][1]], self.max_length
        return text, len(ids)

    def whole(self, texts: Iterable) -> Iterator:
        """Texts cut to `max_length`, without those that a tokenizer cannot read, see [`round_trips`]."""
        cut = (self.cut(text)[0] for text in texts)
        if self.target_tokenizer is None:
            return cut
        return round_trips(cut, {"source": self.source_tokenizer, "target": self.target_tokenizer})

    def read(self, batch: list) -> dict:
        """
        Args:
            batch (`list`):
                As [`PairedStates.batches`] gives them.

        Returns:
            `dict`: For each block `[rows, width]`, one row for each target token after the sinks behind which a source
            token stands, in the models' dtypes.

        Raises:
            `CalibrationError`: a model's states are not finite.
        """
        return self.read_with_counts(batch)[0]

    def read_with_counts(self, batch: list) -> tuple[dict, list[int]]:
        """The same, and how many of the rows are of each text."""
        if self.target_tokenizer is None:
            ids, mask = pad_rows(batch)
            source = SourceKV.prefill(self.source, None, ids, attention_mask=mask, token_losses=False)
            with self._attention_input or nullcontext():
                target = SourceKV.prefill(self.target, None, ids, attention_mask=mask, token_losses=False)
        else:
            source = SourceKV.prefill(self.source, self.source_tokenizer, batch, token_losses=False)
            with self._attention_input or nullcontext():
                target = SourceKV.prefill(self.target, self.target_tokenizer, batch, token_losses=False)
        rows, source_columns, target_columns, first_columns = [], [], [], []
        for number in range(len(batch)):
            first_source, first_target = (len(kv) - int(kv.attention_mask[number].sum()) for kv in (source, target))
            kept = torch.arange(self.sink_tokens, len(target) - first_target)
            index = kept
            if self.target_tokenizer is not None:
                alignment = align_tokens(
                    source.text[number], source.row_spans(number), target.text[number], target.row_spans(number)
                )
                kept = kept[alignment.aligned[self.sink_tokens :]]
                index = alignment.source_index[kept]
            rows.append(torch.full_like(kept, number))
            source_columns.append(index + first_source)
            target_columns.append(kept + first_target)
            first_columns.append(torch.full_like(kept, first_target))
        row, source_column, target_column, first_column = (
            torch.cat(parts) for parts in (rows, source_columns, target_columns, first_columns)
        )
        blocks: dict = {}
        for side, kv, column in (("source", source, source_column), ("target", target, target_column)):
            for layer_idx, states in enumerate(kv.features):
                if states is not None:
                    states = states[row.to(states.device), column.to(states.device)]
                    if not torch.isfinite(states).all():
                        raise CalibrationError(
                            f"The keys and values of {side} layer {layer_idx} hold NaN or Inf, in a batch that begins "
                            f"with {batch[0][:60]!r}. Load both models in float32 or bfloat16."
                        )
                    blocks[side, layer_idx] = states
        names = token_blocks(self.previous_tokens) if self.token_features else []
        for distance, name in enumerate(names):
            column = first_column.maximum(target_column - distance)
            if self._attention_input is not None:
                hidden_states = self._attention_input.hidden_states
                blocks[name] = hidden_states[row.to(hidden_states.device), column.to(hidden_states.device)]
            else:
                with torch.no_grad():
                    token_ids = target.input_ids[row, column].to(input_device(self.target))
                    blocks[name] = self.target.get_input_embeddings()(token_ids)
        return blocks, row.bincount(minlength=len(batch)).tolist()

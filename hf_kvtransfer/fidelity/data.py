"""Evaluation data: what a user gave, opened, checked and cut into contexts and what is scored behind them."""

import dataclasses
from collections import Counter
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import EvaluationDataError
from ..identity.tokenizer import tokenizer_fingerprint
from .chat import render_turns
from .prompts import PromptEncoder
from .row_sources import RowSource, open_sources
from .rows import Choice, Dialogue, Text, TokenIds, ask_questions


@dataclasses.dataclass
class Passage:
    """
    One context, and what is scored behind it.

    Args:
        source_text (`str`, *optional*):
            What the source reads, for [`SourceKV.prefill`]. For dialogues what its own chat template writes, without
            the BOS that its tokenizer puts in front itself.
        source_ids (`list[int]`, *optional*):
            Instead of it, for data that is given as token ids.
        target_ids (`list[int]`):
            The target's ids of the context, at least 2.
        continuations (`list[list[int]]`):
            The target's ids of what follows: one, or one for each ending of a multiple choice.
        characters (`list[int]`):
            Length of the text of each, in characters (of token ids: in tokens).
        label (`int`, *optional*, defaults to 0):
            Index of the continuation that is the right one.
        turn (`int`, *optional*):
            Which of the assistant's turns in its dialogue this is, from 1.
    """

    source_text: str | None
    source_ids: list[int] | None
    target_ids: list[int]
    continuations: list[list[int]]
    characters: list[int]
    label: int = 0
    turn: int | None = None


@dataclasses.dataclass
class Document:
    """
    What is independent of everything else: one row.

    Args:
        key (`str`):
            Unique name: that of the file, and the line.
        capability (`str`):
            What the row tests.
        passages (`list[Passage]`):
            The turns of a dialogue in order, else one.
    """

    key: str
    capability: str
    passages: list[Passage]


@dataclasses.dataclass
class EvaluationData:
    """
    Documents, and where they are from.

    Args:
        documents (`list[Document]`):
            In the order of the data.
        sources (`list[dict]`):
            For each file or iterable its `name`, the `sha256` of the file or of the rows as JSON, the number of
            `documents` made of it, and in `skipped` how many rows (of dialogues also turns) were left out, by reason.
    """

    documents: list[Document]
    sources: list[dict[str, Any]]


def load_evaluation_data(
    data: Any,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
    *,
    context_tokens: int = 256,
    continuation_tokens: int = 64,
    max_length: int = 2048,
    limit: int | None = None,
) -> EvaluationData:
    """
    Open evaluation data.

    A row is one of:

    - `{"text"}` or a string: its first `context_tokens` tokens of the target are the context, and as many as
      `continuation_tokens` after them are scored.
    - `{"context", "continuation"}`: joined as they are.
    - `{"messages"}`, a dialogue with `role` and `content` of each message: each reply of the assistant is scored
      behind all that stands before it, rendered for each model by [`render_turns`].
    - `{"context", "endings", "label"}`, a multiple choice (as HellaSwag): endings follow behind a space, unless they
      begin with white space or punctuation.
    - `{"question", "answer"}` (as GSM8K): a multiple choice between this answer and those of the next three rows that
      differ, the right one first, second, third and fourth in turn. Where there are not four, only the answer is
      scored. A `"context"` beside them is read before the question, with a blank line between.
    - `{"input_ids"}` or token ids, as `{"text"}`, if both models have one vocabulary.

    Args:
        data (`str`, `Path`, `dict` or `Iterable`):
            A file (`.jsonl`, `.ndjson` or `.json` with one row in each line, else plain text, cut at blank lines),
            a list of files, rows, or `{capability: file, files or rows}`. Rows that name a `capability` keep theirs;
            by default it is `"text"`, `"dialogue"`, `"choice"` or `"reasoning"`, after the kind of row.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The source's tokenizer, needed for everything but token ids.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target's, needed likewise; the same object where the two share one.
        context_tokens (`int`, *optional*, defaults to 256):
            Tokens of the target in the context, for running text and token ids.
        continuation_tokens (`int`, *optional*, defaults to 64):
            Tokens of the target that are scored at most. Replies, answers and endings are cut to it.
        max_length (`int`, *optional*, defaults to 2048):
            Longer contexts, in tokens of the target, are left out.
        limit (`int`, *optional*):
            At most so many documents of each file or iterable, spread over all of it.

    Raises:
        `EvaluationDataError`: a file cannot be read, a row cannot be used, or none can.
        `ValueError`: a number of tokens or the limit is too small.
    """
    for name, number, least in (
        ("context_tokens", context_tokens, 2),
        ("continuation_tokens", continuation_tokens, 1),
        ("max_length", max_length, 2),
        ("limit", limit, 1),
    ):
        if number is not None and number < least:
            raise ValueError(f"`{name}` must be at least {least}, got {number}.")
    cutter = _Cutter(source_tokenizer, target_tokenizer, context_tokens, continuation_tokens, max_length)
    opened = EvaluationData([], [])
    # A piece of plain text has about twice the characters that are needed, so that few pieces are too short.
    for source in open_sources(data, piece_length=8 * (context_tokens + continuation_tokens)):
        documents, skipped = cutter.documents(source, limit)
        opened.documents.extend(documents)
        opened.sources.append(
            {"name": source.name, "sha256": source.sha256, "documents": len(documents), "skipped": dict(skipped)}
        )
    return opened


class _Cutter:
    """Makes documents of rows, for two tokenizers and the numbers of tokens that are asked for."""

    def __init__(self, source_tokenizer, target_tokenizer, context_tokens, continuation_tokens, max_length):
        self.source_tokenizer, self.target_tokenizer = source_tokenizer, target_tokenizer
        self.context_tokens, self.continuation_tokens = context_tokens, continuation_tokens
        self.max_length = max_length

    def documents(self, source: RowSource, limit: int | None) -> tuple[list[Document], Counter[str]]:
        rows = list(ask_questions(source.rows))
        buckets = len(rows) if limit is None else min(limit, len(rows))
        documents: list[Document] = []
        skipped: Counter[str] = Counter()
        for bucket in range(buckets):
            # The first row of each stretch that can be used.
            for number, row in rows[bucket * len(rows) // buckets : (bucket + 1) * len(rows) // buckets]:
                try:
                    passages = self._passages(row, skipped)
                except EvaluationDataError as error:
                    raise EvaluationDataError(f"{source.place(number)}: {error}") from error
                if passages:
                    documents.append(Document(f"{source.name}:{number}", row.capability, passages))
                    break
        if not documents:
            reasons = "; ".join(f"{count} {reason}" for reason, count in (+skipped).items()) or "it has no rows"
            raise EvaluationDataError(
                f"{source.path or source.name} has no row that can be used: {reasons}. Running text needs "
                f"{self._text_tokens} tokens of the target (`context_tokens` {self.context_tokens} and "
                f"`continuation_tokens` {self.continuation_tokens}), contexts have at most `max_length` "
                f"{self.max_length}. Give other data, or change these."
            )
        return documents, +skipped

    @property
    def _text_tokens(self) -> int:
        return self.context_tokens + self.continuation_tokens

    @property
    def _too_long(self) -> str:
        return f"with a context of more than {self.max_length} tokens"

    @cached_property
    def _encoders(self) -> tuple[PromptEncoder, PromptEncoder]:
        """Source and target."""
        if self.source_tokenizer is None or self.target_tokenizer is None:
            raise EvaluationDataError(
                "text needs both `source_tokenizer` and `target_tokenizer`. Give them, or rows of token ids."
            )
        return PromptEncoder(self.source_tokenizer), PromptEncoder(self.target_tokenizer)

    @cached_property
    def _one_vocabulary(self) -> bool:
        tokenizers = (self.source_tokenizer, self.target_tokenizer)
        return None in tokenizers or len({tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers}) == 1

    def _passages(self, row: Text | TokenIds | Dialogue | Choice, skipped: Counter[str]) -> list[Passage]:
        """Passages of one row. What is left out is counted in `skipped`."""
        if isinstance(row, TokenIds):
            return self._token_ids(row, skipped)
        if isinstance(row, Text):
            return self._text(row, skipped)
        if isinstance(row, Choice):
            return self._choice(row, skipped)
        return self._dialogue(row, skipped)

    def _token_ids(self, row: TokenIds, skipped: Counter[str]) -> list[Passage]:
        if not self._one_vocabulary:
            raise EvaluationDataError(
                "token ids mean nothing to both models, their tokenizers differ. Give the row's text."
            )
        ids, context = row.input_ids[: self._text_tokens], row.input_ids[: self.context_tokens]
        if not self._fits(ids, skipped):
            return []
        return [Passage(None, context, context, [ids[self.context_tokens :]], [self.continuation_tokens])]

    def _text(self, row: Text, skipped: Counter[str]) -> list[Passage]:
        _, target = self._encoders
        ids, spans = target.encode(row.text)
        if not self._fits(ids, skipped):
            return []
        context, end = self.context_tokens, spans[self.context_tokens - 1][1]
        characters = spans[self._text_tokens - 1][1] - end
        return [Passage(row.text[:end], None, ids[:context], [ids[context : self._text_tokens]], [characters])]

    def _fits(self, ids: list[int], skipped: Counter[str]) -> bool:
        """Whether running text is long enough, and its context not too long."""
        too_short, too_long = len(ids) < self._text_tokens, self.context_tokens > self.max_length
        skipped[f"shorter than {self._text_tokens} tokens"] += too_short
        skipped[self._too_long] += too_long and not too_short
        return not (too_short or too_long)

    def _choice(self, row: Choice, skipped: Counter[str]) -> list[Passage]:
        passage = self._passage(row.context, row.context, row.endings, row.label)
        skipped[self._too_long] += passage is None
        return [] if passage is None else [passage]

    def _dialogue(self, row: Dialogue, skipped: Counter[str]) -> list[Passage]:
        replies = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        turns = {i: number for number, i in enumerate(replies, start=1) if i > 0}
        source, target = self._encoders
        source_turns, target_turns = (
            render_turns(encoder.tokenizer, row.messages, list(turns)) for encoder in (source, target)
        )
        passages = [
            self._passage(source.text_to_read(read), context, [reply], turn=turn)
            for turn, (read, _), (context, reply) in zip(turns.values(), source_turns, target_turns, strict=True)
        ]
        kept = [passage for passage in passages if passage is not None]
        skipped[f"turns {self._too_long}"] += len(passages) - len(kept)
        skipped["turns with nothing before them"] += len(replies) - len(turns)
        skipped["dialogues with no other turns"] += not kept
        return kept

    def _passage(
        self, source_text: str, context: str, continuations: list[str], label: int = 0, turn: int | None = None
    ) -> Passage | None:
        """A passage, or None if its context is too long."""
        _, target = self._encoders
        ids, _ = target.encode(context)
        if len(ids) < 2:
            raise EvaluationDataError(f"the context {context!r} has fewer than 2 tokens of the target.")
        if len(ids) > self.max_length:
            return None
        cut = [target.continuation(context, ids, text, self.continuation_tokens) for text in continuations]
        for (continuation, _), text in zip(cut, continuations, strict=True):
            if not continuation:
                raise EvaluationDataError(f"{text!r:.80} has no tokens of the target behind {context[-40:]!r}.")
        return Passage(source_text, None, ids, [ids for ids, _ in cut], [length for _, length in cut], label, turn)

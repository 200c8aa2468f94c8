"""Which characters of a text each token stands for."""

from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import TokenizerMismatchError


Span = tuple[int, int]

# Decoding shows this for bytes that are not yet a character.
_REPLACEMENT = "\ufffd"
# A character has at most four bytes; after more tokens than that the bytes are not going to become one.
_MAX_PENDING_TOKENS = 8
_WINDOW_TOKENS = 32
# A token decodes differently at the beginning of a text (its leading space is lost), so a few stand before it.
_CONTEXT_TOKENS = 4


def ordered(spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends that never decrease: tokenizers give a trailing special token the span (0, 0)."""
    if not spans:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    starts, ends = torch.tensor(list(chain.from_iterable(spans))).view(-1, 2).T.contiguous()
    empty = starts >= ends
    ends = ends.cummax(0).values
    return torch.where(empty, ends, starts).cummax(0).values, ends


def encode_with_spans(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[Span]]:
    """
    Ids of a text, with the special tokens that the tokenizer puts around it, and the characters of each.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer.
        text (`str`):
            The text.

    Returns:
        `tuple[list[int], list[tuple[int, int]]]`: The ids, and for each its first character and the one after its
        last. Special tokens around the text have none and stand at its beginning and end.

    Raises:
        TokenizerMismatchError: The tokenizer is not a fast one, and does not know where its tokens come from.
    """
    if not tokenizer.is_fast:
        raise TokenizerMismatchError(
            f"{type(tokenizer).__name__} is not a fast tokenizer and does not say which characters a token is for. "
            "Load one with a `tokenizer.json` through `AutoTokenizer.from_pretrained(...)`."
        )
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
    starts, ends = ordered(encoding["offset_mapping"])
    return list(encoding["input_ids"]), list(zip(starts.tolist(), ends.tolist(), strict=True))


def character_spans(tokenizer: PreTrainedTokenizerBase, input_ids: list[int]) -> tuple[str, list[Span]]:
    """
    Text and character spans of tokens of which only the ids are known, such as sampled ones.

    Special tokens that the tokenizer itself puts around a text (a BOS) have no characters, as in its
    `offset_mapping`; all others are part of the text. A tokenizer that does not decode to what it has read (a
    lowercasing one) gives the decoded text: where the original is known, take its `offset_mapping` instead.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer that the ids belong to.
        input_ids (`list[int]` of length `tokens`):
            The ids of one sequence, without padding.

    Returns:
        `tuple[str, list[tuple[int, int]]]`: The text, and for each token its first character and the one after its
        last. Tokens that are pieces of one character share that character.
    """
    ids = [int(token) for token in input_ids]
    added = set(tokenizer("")["input_ids"])
    start, end = 0, len(ids)
    while start < end and ids[start] in added:
        start += 1
    while end > start and ids[end - 1] in added:
        end -= 1
    inner = ids[start:end]
    text = _decode(tokenizer, inner)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    if tokenizer.is_fast and encoding["input_ids"] == inner:
        spans = [(first, behind) for first, behind in encoding["offset_mapping"]]
    else:
        text, spans = _decoded_spans(tokenizer, inner)
    return text, [(0, 0)] * start + spans + [(len(text), len(text))] * (len(ids) - end)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _decoded_spans(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, list[Span]]:
    """Spans from decoding token by token, each time from a window that starts a few tokens back."""
    text: list[str] = []
    spans: list[Span] = []
    window_start = written = 0  # first token of the window; characters of the whole text written so far
    settled = complete = 0  # characters of the decoded window that are written; that are whole characters
    pending = 0
    decoded = ""
    for number in range(len(ids)):
        decoded = _decode(tokenizer, ids[window_start : number + 1])
        whole = max(len(decoded.rstrip(_REPLACEMENT)), complete)
        is_open = whole < len(decoded)
        spans.append((written - settled + complete, written - settled + whole + is_open))
        complete = whole
        pending = pending + 1 if is_open else 0
        if is_open and pending <= _MAX_PENDING_TOKENS:
            continue
        text.append(decoded[settled:])
        written += len(text[-1])
        pending = 0
        if number + 1 - window_start >= _WINDOW_TOKENS:
            window_start = number + 1 - _CONTEXT_TOKENS
            decoded = _decode(tokenizer, ids[window_start : number + 1])
        settled = complete = len(decoded)
    text.append(decoded[settled:])
    return "".join(text), spans

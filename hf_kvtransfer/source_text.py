"""The text that a source has read, row by row, and the characters of it that each token stands for."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from .alignment.spans import character_spans
from .padding import pad_rows, unpad_rows


def decode_rows(
    tokenizer: PreTrainedTokenizerBase, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[list[str], torch.Tensor]:
    """The text of each row, and the characters of each token, `[batch, tokens, 2]`."""
    decoded = [character_spans(tokenizer, row.tolist()) for row in unpad_rows(input_ids, attention_mask)]
    spans, _ = pad_rows([torch.tensor(row).view(-1, 2) for _, row in decoded])
    return [text for text, _ in decoded], spans


def cut_text(
    text: Sequence[str] | None, spans: torch.Tensor | None, attention_mask: torch.Tensor, tokens: slice
) -> tuple[list[str] | None, torch.Tensor | None]:
    """The same of a range of tokens: each row's text from its first character on."""
    if text is None:
        return None, None
    spans, cut = spans[:, tokens].clone(), []
    for row, row_mask in enumerate(attention_mask[:, tokens].bool()):
        begin, end = (int(spans[row, row_mask].min()), int(spans[row, row_mask].max())) if row_mask.any() else (0, 0)
        cut.append(text[row][begin:end])
        spans[row, row_mask] -= begin
    return cut, spans

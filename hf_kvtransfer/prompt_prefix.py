"""How much of a prompt is what a cache stands for, and what the first difference looks like."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefixMatch:
    """
    Args:
        columns (`int`):
            Number of first columns in which every row of the prompt is what the cache stands for.
        difference (`str`, *optional*):
            What the first difference is. `None` if the shorter of the two is the beginning of the longer.
    """

    columns: int
    difference: str | None


def match_prefix(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, cache_ids: torch.Tensor, cache_mask: torch.Tensor
) -> PrefixMatch:
    """
    Find the longest common prefix of a prompt and of what a cache stands for.

    Args:
        prompt_ids (`torch.LongTensor`), prompt_mask (`torch.LongTensor`):
            The prompt and its attention mask, `[batch, tokens]`, left-padded.
        cache_ids (`torch.LongTensor`), cache_mask (`torch.LongTensor`):
            The same for the tokens in the cache, `[batch, cached_tokens]`, on the CPU.

    Returns:
        [`PrefixMatch`]
    """
    columns = min(prompt_ids.shape[1], cache_ids.shape[1])
    found, expected = prompt_ids[:, :columns].cpu(), cache_ids[:, :columns]
    found_mask, expected_mask = prompt_mask[:, :columns].cpu().bool(), cache_mask[:, :columns].bool()
    # What stands in padding does not matter.
    differs = (found_mask != expected_mask) | (expected_mask & (found != expected))
    if not differs.any():
        return PrefixMatch(columns, None)
    column = int(differs.any(0).nonzero()[0])
    row = int(differs[:, column].nonzero()[0])
    if found_mask[row, column] != expected_mask[row, column]:
        is_padding = "a token" if expected_mask[row, column] else "padding"
        difference = f"the prompt is padded otherwise: in row {row}, column {column}, the cache has {is_padding}"
    else:
        difference = (
            f"row {row} of the prompt has token {int(found[row, column])} at column {column}, the cache stands for "
            f"token {int(expected[row, column])} there"
        )
    hint = _first_token_hint(found[row, found_mask[row]].tolist(), expected[row, expected_mask[row]].tolist())
    return PrefixMatch(column, difference + hint)


def _first_token_hint(found: list[int], expected: list[int]) -> str:
    """Names the usual reason for two rows that are the same but for their first token."""
    if found[:2] == expected[:1] * 2 != expected[:2]:
        return (
            f". The prompt starts with token {found[0]} twice: a chat template and the tokenizer have both added a "
            "BOS (encode a rendered template with `add_special_tokens=False`)"
        )
    if len(expected) > 2 and found[:4] == expected[1:5] != expected[:4]:
        return (
            f". The prompt lacks the first token, {expected[0]}: the source's context was encoded with a BOS, the "
            "prompt without"
        )
    return ""

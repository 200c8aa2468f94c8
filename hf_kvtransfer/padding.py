"""Rows of tokens of different lengths as one left-padded batch."""

from collections.abc import Sequence

import torch

from .errors import BatchMismatchError


def pad_rows(rows: Sequence[torch.Tensor | list]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Stack rows of different lengths, padding on the left with zeros.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[batch, tokens, ...]` and the attention mask `[batch, tokens]`.
    """
    tensors = [torch.as_tensor(row) for row in rows]
    length = max(len(row) for row in tensors)
    padded = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    mask = torch.zeros(len(tensors), length, dtype=torch.long)
    for i, row in enumerate(tensors):
        padded[i, length - len(row) :] = row
        mask[i, length - len(row) :] = 1
    return padded, mask


def unpad_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The token ids of each row of a batch `[batch, tokens]`, without padding, on the CPU."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    check_left_padded(mask)
    return [row[row_mask].cpu() for row, row_mask in zip(input_ids, mask.bool(), strict=True)]


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """The position ids that `generate` derives from a mask: counted from each row's first token, 0 for padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def check_left_padded(attention_mask: torch.Tensor) -> None:
    """Raise [`BatchMismatchError`] if a row has padding behind or between its tokens."""
    wrong = (attention_mask[:, 1:] < attention_mask[:, :-1]).any(-1).nonzero()
    if len(wrong):
        raise BatchMismatchError(
            f"Row {int(wrong[0])} of `attention_mask` has padding behind a token. Pad on the left: "
            '`tokenizer(..., padding=True, padding_side="left")`.'
        )


def mask_and_positions(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask and positions of a batch `[batch, tokens]`, checked; those of `generate` where they are `None`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device).long()
    positions = positions_from_mask(mask) if position_ids is None else position_ids.to(input_ids.device)
    check_same_shape("attention_mask", mask, input_ids)
    check_same_shape("position_ids", positions, input_ids)
    check_left_padded(mask)
    return mask, positions


def check_same_shape(name: str, tensor: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Raise [`BatchMismatchError`] if a tensor has not one entry for each token."""
    if tensor.shape != input_ids.shape:
        raise BatchMismatchError(
            f"`{name}` has shape {list(tensor.shape)}, `input_ids` {list(input_ids.shape)}: they must be equal."
        )

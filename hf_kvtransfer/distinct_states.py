"""What a model's first layer makes of each distinct token of a context, where it depends on nothing but the id."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .native_states import read_first_layers
from .rotary import Rotary


# Of all tokens, above which it does not pay to look up what the distinct ones give.
MAX_DISTINCT = 2 / 3
# Tokens that are read a second time, at another position and behind another token, to see that it makes no difference.
_CHECKED = 8
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class DistinctStates:
    """
    What a model computes of a context's distinct tokens before its first attention. Made by [`read_distinct`].

    Args:
        index (`torch.LongTensor`):
            `[batch, tokens]`, the row of each token.
        key_states (`torch.Tensor`), value_states (`torch.Tensor`):
            Position-free keys, and values, of layer 0, `[heads, rows, head_dim]`.
        hidden_states (`torch.Tensor`):
            `[rows, hidden_size]`, what the attention of layer 0 is called with.
    """

    index: torch.Tensor
    key_states: torch.Tensor
    value_states: torch.Tensor
    hidden_states: torch.Tensor

    def keys_and_values(
        self, start: int, stop: int, model: PreTrainedModel, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Keys at their positions, and values, of a range of tokens.

        Args:
            start (`int`), stop (`int`):
                Range of the context's tokens.
            model (`PreTrainedModel`):
                That which has read them.
            position_ids (`torch.LongTensor`):
                `[batch, stop - start]`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: New tensors `[batch, heads, stop - start, head_dim]`.
        """
        rows = self.index[:, start:stop].to(self.key_states.device)
        keys, values = (
            states.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)
            for states in (self.key_states, self.value_states)
        )
        return Rotary.from_model(model).at(position_ids).apply(keys, 0, out=keys), values


def read_distinct(model: PreTrainedModel, input_ids: torch.Tensor) -> DistinctStates | None:
    """
    Let a model's first layer read each distinct token of a context once.

    A few are read twice: a model that adds positions to its embeddings, or lets neighbours into its keys, is noticed.

    Args:
        model (`PreTrainedModel`):
            The model.
        input_ids (`torch.LongTensor`):
            The context, `[batch, tokens]`.

    Returns:
        `DistinctStates`, *optional*: `None` if tokens hardly repeat, if their states do not follow from their ids, or
        in dtypes in which keys would not come out as exact as the model's own.
    """
    distinct, index = input_ids.unique(return_inverse=True)
    again = distinct[:_CHECKED].flip(0)
    count = len(distinct)
    # No longer than the context: a longer one might be longer than the model's positions.
    if count > MAX_DISTINCT * input_ids.numel() or count + len(again) > input_ids.shape[1]:
        return None
    if model.dtype != torch.float32:
        return None
    read = read_first_layers(model, torch.cat([distinct, again])[None], num_layers=0)
    layer: Any = read.keys_and_values[0]
    keys, values, hidden_states = layer[0], layer[1], read.hidden_states
    keys = Rotary.from_model(model).at(torch.arange(keys.shape[2])[None]).remove(keys, 0)
    for states in (keys[0], values[0], hidden_states):  # [..., rows, features]
        if not _same(states[:, count:].flip(1), states[:, : len(again)]):
            return None
    return DistinctStates(index, keys[0, :, :count], values[0, :, :count], hidden_states[0, :count])


def _same(states: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((states - others).norm() <= _TOLERANCE * others.norm())

"""What a model's first layer makes of each distinct token of a context, where it depends on nothing but the id."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .native_states import read_first_layers
from .rotary import Rotary


# Tokens that are read a second time, at another position and behind another token, to see that it makes no difference.
_CHECKED = 8
_TOLERANCE = 1e-4


@dataclass(eq=False)
class DistinctStates:
    """
    What a model computes of a context's distinct tokens before its first attention. Made by [`read_distinct`].

    Args:
        index (`torch.LongTensor`):
            `[batch, tokens]`, the row of each token. Rows are in the order in which the tokens last occur, from the
            end of the context: what stands in its last columns is in the first rows.
        hidden_states (`torch.Tensor`):
            `[rows, hidden_size]`, what the attention of layer 0 is called with.
        key_states (`torch.Tensor`, *optional*), value_states (`torch.Tensor`, *optional*):
            Position-free keys, and values, of layer 0, `[heads, rows, head_dim]`; until they are asked for, which
            mostly happens once.
    """

    index: torch.Tensor
    hidden_states: torch.Tensor
    key_states: torch.Tensor | None
    value_states: torch.Tensor | None

    def keys_and_values(
        self, start: int, stop: int, model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Keys at their positions, and values, of a range of tokens. The second time the model reads them again.

        Args:
            start (`int`), stop (`int`):
                Range of the context's tokens.
            model (`PreTrainedModel`):
                That which has read them.
            input_ids (`torch.LongTensor`), position_ids (`torch.LongTensor`):
                Of the context, `[batch, tokens]`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: New tensors `[batch, heads, stop - start, head_dim]`.
        """
        position_ids = position_ids[:, start:stop]
        key_states, value_states = self.key_states, self.value_states
        self.key_states = self.value_states = None
        if key_states is None or value_states is None:
            ids = input_ids[:, start:stop]
            layer: Any = read_first_layers(model, ids, position_ids=position_ids, num_layers=0).keys_and_values[0]
            return layer
        rows = self.index[:, start:stop].to(key_states.device)
        keys, values = (
            states.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)
            for states in (key_states, value_states)
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
    distinct, index = _from_the_last(input_ids)
    again = distinct[:_CHECKED].flip(0)
    count = len(distinct)
    # No longer than the context: a longer one might be longer than the model's positions.
    if count + len(again) > input_ids.shape[1] or model.dtype != torch.float32:
        return None
    read = read_first_layers(model, torch.cat([distinct, again])[None], num_layers=0)
    layer: Any = read.keys_and_values[0]
    keys, values, hidden_states = layer[0], layer[1], read.hidden_states
    keys = Rotary.from_model(model).at(torch.arange(keys.shape[2])[None]).remove(keys, 0)
    for states in (keys[0], values[0], hidden_states):  # [..., rows, features]
        if not _same(states[:, count:].flip(1), states[:, : len(again)]):
            return None
    return DistinctStates(index, hidden_states[0, :count], keys[0, :, :count], values[0, :, :count])


def _from_the_last(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids in the order in which they last occur, from the end, and the place of each token's id there."""
    distinct, index = input_ids.unique(return_inverse=True)
    columns = torch.arange(input_ids.shape[1]).expand_as(index)
    last = columns.new_zeros(len(distinct)).scatter_reduce_(0, index.flatten(), columns.flatten(), "amax")
    order = last.argsort(descending=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return distinct[order], place[index]


def _same(states: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((states - others).norm() <= _TOLERANCE * others.norm())

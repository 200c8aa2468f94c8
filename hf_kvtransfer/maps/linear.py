"""One affine map from the selected source layers, and the target's token embedding, to one target layer."""

from collections.abc import Sequence

import torch
from torch import nn


class LinearMap(nn.Module):
    """
    All heads of one target layer from all heads of a few source layers in one matrix product.

    The features are position-free keys and values, so the map holds at any position. It is the closed-form ridge
    map of cross-model cache transfer, with two differences: all source heads feed every target head, so head counts
    may differ, and the target's own embedding of the token is a feature too.

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        in_features (`int`):
            Width of the features: keys and values of every selected layer, then the token embedding if there is one.
        out_features (`int`):
            Width of the target layer's keys and values, all heads.
    """

    def __init__(self, source_layers: Sequence[int], in_features: int, out_features: int):
        super().__init__()
        self.source_layers = tuple(source_layers)
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            source_features (`Sequence[torch.Tensor]`):
                For each selected layer its keys and values, `[batch, source_tokens, features]`.
            token_features (`torch.Tensor`, *optional*):
                The target's embeddings of its tokens, `[batch, target_tokens, hidden_size]`.
            source_index (`torch.Tensor`, *optional*):
                `[batch, target_tokens]`, the source token that speaks for each target token. `None` if they are the
                same tokens.

        Returns:
            `torch.Tensor`: Keys then values of all heads, position-free, `[batch, target_tokens, out_features]`.
        """
        dtype = source_features[0].dtype
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        blocks = weight.split(
            [states.shape[-1] for states in (*source_features, token_features) if states is not None], 1
        )
        # A sum of products, block by block, needs no copy of the concatenated features; and gathering the sum moves
        # `out_features` numbers a token where gathering the features first would move all of them.
        batch, tokens, _ = source_features[0].shape
        output = torch.addmm(bias, source_features[0].reshape(batch * tokens, -1), blocks[0].T)
        for states, block in zip(source_features[1:], blocks[1:], strict=False):
            output.addmm_(states.reshape(batch * tokens, -1), block.T)
        output = output.view(batch, tokens, -1)
        if source_index is not None:
            output = at_tokens(output, source_index)
        if token_features is not None:
            flat = output.view(-1, output.shape[-1])
            flat.addmm_(token_features.to(dtype).reshape(flat.shape[0], -1), blocks[-1].T)
        return output


def at_tokens(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """States `[batch, tokens, features]` of the tokens that each row of `index` `[batch, target_tokens]` names."""
    return states[torch.arange(len(states), device=states.device)[:, None], index]

"""One affine map from the selected source layers, and the target's view of the token, to one target layer."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..geometry import KVGeometry, LayerGeometry
from .base import LayerMap, num_previous
from .storage import dense


# Rows of token features, of all tokens, above which it does not pay to multiply each row once and then look it up.
MAX_DISTINCT = 2 / 3
# Parts in which what depends on the tokens is looked up: all at once would be as large as the output. Below so many
# numbers it is too little to matter.
_PARTS = 4
_MIN_PART = 2**15


class LinearMap(LayerMap):
    """
    All heads of one target layer from all heads of a few source layers in one matrix product.

    The features are position-free keys and values, so the map holds at any position. It is the closed-form ridge
    map of cross-model cache transfer, with two differences: all source heads feed every target head, so head counts
    may differ, and the target's own view of the token is a feature too.

    Args:
        source_layers (`Sequence[int]`):
            Source layers that the map reads, in the order of its input features.
        in_features (`int`):
            Width of the features: keys and values of every selected layer, then the token features if there are any.
        out_features (`int`):
            Width of the target layer's keys and values, all heads.
        previous_tokens (`int`, *optional*, defaults to 0):
            Tokens before each token whose features are among its own.
    """

    optional_fields = ("previous_tokens",)

    def __init__(self, source_layers: Sequence[int], in_features: int, out_features: int, previous_tokens: int = 0):
        super().__init__()
        self.source_layers, self.previous_tokens = tuple(source_layers), previous_tokens
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "LinearMap":
        """The untrained map of `{"kind": "linear", "source_layers": [3, 4]}`, see [`LayerMap.from_spec`]."""
        in_features = num_inputs(spec, source, token_features)
        return cls(spec["source_layers"], in_features, sum(target.widths), num_previous(spec, token_features))

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As [`LayerMap.forward`]."""
        dtype = source_features[0].dtype
        weight, bias = dense(self.weight, dtype), self.bias.to(dtype)
        return affine(weight, bias, source_features, token_features, source_index, token_index)

    @torch.no_grad()
    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """As [`LayerMap.compose`]."""
        self.weight.copy_(matrix @ self.weight)
        self.bias.copy_(matrix @ self.bias + offset)


def num_inputs(spec: dict, source: KVGeometry, token_features: int) -> int:
    """Width of the features of a map that reads all heads of its source layers, and tokens."""
    num_tokens = 1 + num_previous(spec, token_features)
    return sum(source.num_features(i) for i in spec["source_layers"]) + num_tokens * token_features


def affine(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    source_features: Iterable[torch.Tensor],
    token_features: torch.Tensor | None,
    source_index: torch.Tensor | None,
    token_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    `weight @ features + bias` at every token, for one map or for one map for each head.

    A sum of products, block by block, needs no copy of the concatenated features; and gathering the sums moves
    `out_features` numbers a token where gathering the features first would move all of them.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]` or `[heads, out_features, in_features]`.
        bias (`torch.Tensor`, *optional*):
            `[out_features]` or `[heads, out_features]`.
        source_features (`Iterable[torch.Tensor]`):
            Blocks of features, in the order of the weight's columns, `[batch, source_tokens, features]` or
            `[heads, batch, source_tokens, features]`.
        token_features (`torch.Tensor`, *optional*):
            For the weight's last columns, see [`LayerMap.forward`].
        source_index (`torch.Tensor`, *optional*), token_index (`torch.Tensor`, *optional*):
            See [`LayerMap.forward`].

    Returns:
        `torch.Tensor`: `[batch, target_tokens, out_features]` or `[heads, batch, target_tokens, out_features]`.
    """
    output, column = None, 0
    for states in source_features:
        width = states.shape[-1]
        output = _add_product(bias if output is None else output, states, weight[..., column : column + width].mT)
        column += width
    if source_index is not None:
        output = at_tokens(output, source_index)
    if token_features is not None:
        token_features = token_features.to(output.dtype)
        if token_index is None:
            states = token_features.expand(*output.shape[:-1], -1)
            output = _add_product(output, states, weight[..., column:].mT)
        else:
            blocks = weight[..., column:].split(token_features.shape[-1], -1)
            for block, index in zip(blocks, token_index, strict=True):
                _add_looked_up(output.flatten(-3, -2), token_features, block.mT, index.flatten())
    return output


def _add_looked_up(
    output: torch.Tensor, token_features: torch.Tensor, block: torch.Tensor, token_index: torch.Tensor
) -> None:
    """Add `token_features @ block`, at the row of each token, to `output` `[..., tokens, out_features]`, in place."""
    repeats = len(token_features) <= MAX_DISTINCT * len(token_index)
    products = token_features @ block if repeats else None
    widest = max(output.shape[-1], token_features.shape[-1])
    size = max(_MIN_PART // widest, -(-len(token_index) // _PARTS), 1)
    for number, rows in enumerate(token_index.split(size)):
        part = output.narrow(-2, number * size, len(rows))
        if products is not None:
            part.add_(products.index_select(-2, rows))
        elif block.dim() == 2:
            part.addmm_(token_features.index_select(0, rows), block)
        else:
            part.add_(token_features.index_select(0, rows) @ block)


def _add_product(start: torch.Tensor | None, states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """
    `start + states @ block`, in place if `start` is an earlier result.

    Args:
        start (`torch.Tensor`, *optional*):
            `[..., out_features]`, a bias or a result.
        states (`torch.Tensor`):
            `[batch, tokens, features]` or `[heads, batch, tokens, features]`.
        block (`torch.Tensor`):
            `[features, out_features]` or `[heads, features, out_features]`.
    """
    if start is None:
        return states @ (block.unsqueeze(-3) if states.dim() > 3 else block)
    *heads, batch, tokens, width = states.shape
    if not heads and batch > 1 and not states.is_contiguous():
        # A range of each row's tokens: flat rows would be a copy.
        block = block.expand(batch, -1, -1)
        return torch.baddbmm(start, states, block) if start.dim() < 3 else start.baddbmm_(states, block)
    rows = states.reshape(*heads, batch * tokens, width)
    if start.dim() == len(heads) + 1:
        product = torch.baddbmm(start.unsqueeze(-2), rows, block) if heads else torch.addmm(start, rows, block)
        return product.unflatten(-2, (batch, tokens))
    flat = start.view(*heads, batch * tokens, -1)
    flat.baddbmm_(rows, block) if heads else flat.addmm_(rows, block)
    return start


def at_tokens(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """States `[..., batch, tokens, features]` of the tokens in each row of `index` `[batch, target_tokens]`."""
    batch, tokens = states.shape[-3:-1]
    if batch > 1:
        index = index + torch.arange(0, batch * tokens, tokens, device=index.device)[:, None]
    # Row by row, and several times as fast as advanced indexing.
    return states.flatten(-3, -2).index_select(-2, index.flatten()).unflatten(-2, index.shape)

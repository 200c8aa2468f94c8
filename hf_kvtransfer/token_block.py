"""What the maps of all layers read of one range of tokens, apart from the source's states."""

from dataclasses import dataclass

import torch

from .rotary import RotaryTables


@dataclass(frozen=True, eq=False)
class Block:
    """
    A range of the target's tokens.

    Args:
        source (`slice`):
            The source's tokens that speak for them.
        source_index (`torch.LongTensor`, *optional*):
            `[batch, tokens]`, which of these speaks for each token. `None` if they are in step.
        token_features (`torch.Tensor`, *optional*), token_index (`torch.LongTensor`, *optional*):
            See [`TargetTokens.features`].
        tables ([`RotaryTables`]):
            At the positions of the tokens.
    """

    source: slice
    source_index: torch.Tensor | None
    token_features: torch.Tensor | None
    token_index: torch.Tensor | None
    tables: RotaryTables

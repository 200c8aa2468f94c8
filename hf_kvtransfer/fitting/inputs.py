"""What a layer map reads."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from .states import token_blocks


@dataclasses.dataclass(frozen=True)
class Inputs:
    """
    What the map of one target layer reads, beside the token features of each token.

    Args:
        source_layers (`Sequence[int]`):
            Layers of the source.
        previous_tokens (`int`, *optional*, defaults to 0):
            Tokens before each token, of which token features are read, too.
    """

    source_layers: Sequence[int]
    previous_tokens: int = 0

    def with_layer(self, source_layer: int) -> "Inputs":
        """One more source layer, in the source's order."""
        return dataclasses.replace(self, source_layers=sorted([*self.source_layers, source_layer]))

    def with_token(self) -> "Inputs":
        """One more token before."""
        return dataclasses.replace(self, previous_tokens=self.previous_tokens + 1)

    def blocks(self, reads_tokens: bool) -> list[Hashable]:
        """The names of [`PairedStates`]'s blocks, in the order of a map's features."""
        tokens = token_blocks(self.previous_tokens) if reads_tokens else []
        return [*(("source", j) for j in self.source_layers), *tokens]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

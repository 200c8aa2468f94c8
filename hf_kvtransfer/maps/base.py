"""What every kind of layer map has."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from ..geometry import KVGeometry, LayerGeometry


class LayerMap(nn.Module):
    """From features of the source to the keys and values of one target layer."""

    spec_fields: ClassVar[tuple[str, ...]] = ("source_layers",)  # beside `kind`, all of them required
    optional_fields: ClassVar[tuple[str, ...]] = ()
    source_layers: tuple[int, ...]
    # Tokens before each token whose token features are read, too.
    previous_tokens: int = 0

    @classmethod
    def from_spec(cls, spec: dict, source: KVGeometry, target: LayerGeometry, token_features: int) -> "LayerMap":
        """
        The untrained map that a layer's entry in a mapper's config describes.

        Args:
            spec (`dict`):
                The entry. Its source layers exist, and it has no unknown fields.
            source (`KVGeometry`):
                What the source caches.
            target (`LayerGeometry`):
                What the target layer caches.
            token_features (`int`):
                Width of one token's features, 0 if there are none.

        Raises:
            `ValueError`, `TypeError`, `KeyError`: a field is missing or impossible.
        """
        raise NotImplementedError

    @property
    def workspace(self) -> int | None:
        """Numbers a token that there are at most on the way, `None` for twice as many as it puts out."""
        return None

    def forward(
        self,
        source_features: Sequence[torch.Tensor],
        token_features: torch.Tensor | None = None,
        source_index: torch.Tensor | None = None,
        token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            source_features (`Sequence[torch.Tensor]`):
                For each selected layer its keys and values, `[batch, source_tokens, features]`.
            token_features (`torch.Tensor`, *optional*):
                The target's embeddings of its tokens, or its hidden states behind its native layers: at each token
                its own, then those of the token before it, and so on, side by side,
                `[batch, target_tokens, (1 + previous_tokens) * hidden_size]`. With `token_index` the distinct ones,
                `[rows, hidden_size]`.
            source_index (`torch.Tensor`, *optional*):
                `[batch, target_tokens]`, the source token that speaks for each target token. `None` if they are the
                same tokens.
            token_index (`torch.Tensor`, *optional*):
                `[1 + previous_tokens, batch, target_tokens]`, the row of `token_features` of each target token, of
                the token before it, and so on.

        Returns:
            `torch.Tensor`: Keys then values of all heads, position-free, `[batch, target_tokens, out_features]`.
        """
        raise NotImplementedError(f"A {type(self).__name__} has nothing to apply.")

    def compose(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        """
        Change the weights, in place, so that the map gives `matrix @ output + offset` from now on.

        Args:
            matrix (`torch.Tensor`):
                `[out_features, out_features]`; keys and values of different heads are not mixed.
            offset (`torch.Tensor`):
                `[out_features]`.

        Raises:
            `NotImplementedError`: a map of this kind has no weights that could do that.
        """
        raise NotImplementedError(f"The outputs of a {type(self).__name__} are not made by its weights alone.")


def whole_number(spec: dict, field: str, at_least: int) -> int:
    """A spec's field, if it is an integer and large enough, else `ValueError`."""
    number = spec[field]
    if type(number) is not int or number < at_least:
        raise ValueError(f"`{field}` must be an integer of {at_least} or more, got {number!r}")
    return number


def num_previous(spec: dict, token_features: int) -> int:
    """A spec's `previous_tokens`, 0 if there are none, else `ValueError` if it is impossible."""
    if "previous_tokens" not in spec:
        return 0
    if not token_features:
        raise ValueError("`previous_tokens` are read of token features, and the mapper has none")
    return whole_number(spec, "previous_tokens", 1)

"""The maps of a translation, applied to one block of tokens after the other, so that they take little room."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .geometry import KVGeometry, LayerGeometry
from .mapper import KVMapper
from .pair import check_token_features
from .rotary import Rotary, RotaryTables
from .source import SourceKV
from .target_tokens import TargetTokens


# Tokens, of all rows, that are mapped at a time: a map's weights are read for many of them, and what a map computes on
# the way stays small however long the context.
_MAX_BLOCK = 2048
_MIN_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Block:
    """
    A range of the target's tokens.

    Args:
        source (`slice`):
            The source's tokens that speak for them.
        source_index (`torch.LongTensor`, *optional*):
            `[batch, tokens]`, which of these speaks for each token. `None` if they are in step.
        token_features (`torch.Tensor`, *optional*):
            See [`TargetTokens.features`].
        token_index (`torch.LongTensor`, *optional*):
            `[1 + previous tokens, batch, tokens]`, see [`LayerMap.forward`].
        tables ([`RotaryTables`]):
            At the positions of the tokens.
    """

    source: slice
    source_index: torch.Tensor | None
    token_features: torch.Tensor | None
    token_index: torch.Tensor | None
    tables: RotaryTables


class BlockwiseMaps:
    """
    The part of a [`Translation`] that maps ranges of tokens.

    What is there beside the cache at any time is no larger than two of the cache's largest layers.
    """

    source_kv: SourceKV
    mapper: KVMapper
    target: PreTrainedModel
    geometry: KVGeometry
    length: int
    # For each of the target's tokens the source's one that speaks for it, and its position, `[batch, tokens]`.
    source_index: torch.Tensor
    key_positions: torch.Tensor
    # Where each row begins, behind its padding, `[batch]`.
    _first_token: torch.Tensor
    _in_step: bool
    _rotary: Rotary
    _target_tokens: TargetTokens
    _last_block: dict[tuple, tuple[Block, tuple]]

    @property
    def batch_size(self) -> int:
        return self.source_kv.batch_size

    def _map_range(self, layer_idx: int, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Write what a layer's map makes of a range of tokens.

        Args:
            layer_idx (`int`), start (`int`), stop (`int`):
                As of [`Translation.layer`].
            keys (`torch.Tensor`), values (`torch.Tensor`):
                Where to write them, `[batch, heads, stop - start, head_dim]`.
        """
        device, dtype = keys.device, keys.dtype
        layer_map, layer = self.mapper.layer_on(layer_idx, device, dtype), self.geometry.layers[layer_idx]
        assert layer is not None
        for begin, end, room in self._ranges(layer_map, layer, start, stop, device, dtype):
            block, columns = self._block(begin, end, room, device, dtype), slice(begin - start, end - start)
            self._map_block(layer_map, layer_idx, block, keys[:, :, columns], values[:, :, columns])

    def _ranges(
        self, layer_map: Any, layer: LayerGeometry, start: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[int, int, int]]:
        """
        Tokens to map at a time, so that all that is there beside the cache is no larger than two layers: ranges, and
        how many numbers more there may be.
        """
        if start >= stop:
            return []
        config = self.mapper.config
        largest = self._largest_layer() * self.batch_size
        room = 2 * largest - largest // 8  # for all that is small: ids, indices, masks
        # What a map makes of a token, once more at the target's token, and cos and sin where they are not kept.
        width = layer_map.workspace or 2 * sum(layer.widths)
        width += 0 if self._rotary.keeps(self.key_positions[:, start:stop]) else layer.key_head_dim
        if config.token_features:
            if config.native_layers is None:
                width += config.token_features
            else:
                self._check_native_layers(config.native_layers)
                room -= self._target_tokens.num_held(config.native_layers)
                width += config.token_features if config.previous_tokens else 0  # those of a range of each row
        features = [self.source_kv.features[i] for i in layer_map.source_layers]
        # Of another device or dtype they are copied first; else maps read them where they are.
        width += sum(part.shape[-1] for part in features if (part.device, part.dtype) != (device, dtype))
        width *= self.batch_size
        # Beside hidden states that are as wide as several layers nothing is small, and blocks only become slow.
        size = max(room, largest) // width
        size = max(1, min(_MAX_BLOCK // self.batch_size, max(_MIN_BLOCK, size)))
        size = -(-(stop - start) // -(-(stop - start) // size))
        ranges = [(begin, min(begin + size, stop), room - width * size) for begin in range(start, stop, size)]
        # The block that is held comes first.
        return ranges[::-1] if any(key[:2] == ranges[-1][:2] for key in list(self._last_block)) else ranges

    def _block(self, start: int, stop: int, room: int, device: torch.device, dtype: torch.dtype) -> Block:
        """What depends on the tokens alone. The last one is held: the next layer mostly asks for the same."""
        config = self.mapper.config
        tensors = self.source_index, self.key_positions  # which a changed copy of the translation may have exchanged
        layout = config.token_features, config.native_layers, config.previous_tokens
        key = start, stop, device, dtype, *layout, *map(id, tensors)
        known = self._last_block.get(key)
        if known is not None:
            return known[0]
        self._last_block.clear()  # two would be as large as a layer
        first, last, index = start, stop, None
        if not self._in_step:
            index = self.source_index[:, start:stop]
            first, last = int(index.min()), int(index.max()) + 1
            index = (index - first).to(device)
        token_features = token_index = None
        if config.token_features:
            token_features, token_index = self._token_features(start, stop, room)
            token_features = token_features.to(device, dtype)
            token_index = None if token_index is None else token_index.to(device)
        tables = self._rotary.at(self.key_positions[:, start:stop])
        block = Block(slice(first, last), index, token_features, token_index, tables)
        self._last_block[key] = block, tensors
        return block

    def _token_features(self, start: int, stop: int, room: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As [`TargetTokens.features`], with the row also of the tokens before each token, as [`LayerMap.forward`]."""
        config = self.mapper.config
        begin = max(start - config.previous_tokens, 0)
        features, index = self._target_tokens.features(begin, stop, config.native_layers, room)
        if not config.previous_tokens:
            return features, None if index is None else index[None]
        if index is None:
            index = torch.arange(self.batch_size * (stop - begin)).view(self.batch_size, -1)
            features = features.flatten(0, 1)
        # A row's first token is taken to be its own predecessor.
        columns, first = torch.arange(start, stop), self._first_token[:, None]
        places = [columns.minimum(first.maximum(columns - d)) - begin for d in range(1 + config.previous_tokens)]
        return features, torch.stack([index.gather(1, place.to(index.device)) for place in places])

    def _largest_layer(self) -> int:
        """Scalars that the cache's largest layer holds of one row."""
        sizes = (
            sum(layer.widths) * min(self.length, (layer.sliding_window or self.length + 1) - 1)
            for layer in self.geometry.layers
            if layer is not None
        )
        return max(sizes)

    @torch.no_grad()
    def _map_block(
        self, layer_map: Any, layer_idx: int, block: Block, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write what a map makes of a block to `keys` and `values`; a method, so that nothing of it outlives it."""
        block.tables.prepare(layer_idx, keys.device)
        features = [
            self.source_kv.features[i][:, block.source].to(keys.device, keys.dtype) for i in layer_map.source_layers
        ]
        token_index = None if block.token_index is None else block.token_index[: 1 + layer_map.previous_tokens]
        mapped = layer_map(features, block.token_features, block.source_index, token_index)
        key_states, value_states = self.geometry.layers[layer_idx].split_heads(mapped)
        block.tables.apply(key_states, layer_idx, out=keys)
        values.copy_(value_states)

    def _check_native_layers(self, num_layers: int) -> None:
        # Here and not where it is read: before the first layer is used, the target can still read the context itself.
        states = self._target_tokens.native_states(num_layers)
        check_token_features(self.mapper, self.target, states.hidden_states.shape[-1])

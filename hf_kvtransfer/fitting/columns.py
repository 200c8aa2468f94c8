"""Where the heads of a layer are among the columns of its keys and values."""

import torch

from ..geometry import LayerGeometry


def key_value_columns(layer: LayerGeometry, head: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Columns of a layer's keys and of its values, where the keys of all heads stand before the values of all heads.

    Args:
        layer ([`LayerGeometry`]):
            The layer.
        head (`int`, *optional*):
            One KV head. `None` for all of them.
    """
    columns = torch.arange(sum(layer.widths)).split(layer.widths)
    if head is None:
        return columns[0], columns[1]
    keys, values = (part.view(layer.num_key_value_heads, -1)[head] for part in columns)
    return keys, values

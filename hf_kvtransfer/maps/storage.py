"""Weight matrices of layer maps in 8 or 4 bits, with nothing but torch."""

import copy
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad


# Codes are symmetric around 0, so that a weight of 0 stays 0.
LARGEST_CODE = {8: 127, 4: 7}

# Layer maps with plain weights beside those whose weights are stored otherwise, and what they were made of.
_PLAIN: WeakKeyDictionary[nn.Module, tuple[tuple, nn.Module]] = WeakKeyDictionary()


class QuantizedWeight(nn.Module):
    """
    A weight matrix, or a batch of them, as small integers.

    Columns are divided by their norm, because the scales of features differ by orders of magnitude and those of
    weights with them. Then `group_size` neighbours of a row share one scale, that of the largest of them. Norms and
    scales are bfloat16, and codes are chosen for the rounded ones, so that their rounding costs nothing.

    Args:
        shape (`torch.Size`):
            Of the weight, `[..., out_features, in_features]`.
        bits (`int`):
            8, or 4 for two codes in a byte.
        group_size (`int`):
            Number of weights along the input that share a scale. The last group of a row may be shorter.

    Raises:
        `ValueError`: `bits` or `group_size` is not possible.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    column_norms: torch.Tensor

    def __init__(self, shape: torch.Size, bits: int, group_size: int):
        super().__init__()
        check_storage(bits, group_size)
        *batch, out_features, in_features = shape
        group_size = min(group_size, max(in_features, 1))  # a row has no more
        self.shape, self.bits, self.group_size = torch.Size(shape), bits, group_size
        num_groups = -(-in_features // group_size)
        # The first half of the codes in the low four bits, the second in the high ones: no row is padded.
        codes = torch.zeros(shape, dtype=torch.int8) if bits == 8 else _pack(torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.zeros(*batch, out_features, num_groups, dtype=torch.bfloat16))
        self.register_buffer("column_norms", torch.ones(*batch, in_features, dtype=torch.bfloat16))

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: torch.Tensor, bits: int, group_size: int) -> "QuantizedWeight":
        """
        Args:
            weight (`torch.Tensor`):
                `[..., out_features, in_features]`. NaN and Inf make scales that are not finite.
            bits (`int`), group_size (`int`):
                As in [`QuantizedWeight`].
        """
        check_storage(bits, group_size)
        with torch.device("meta"):
            quantized = cls(weight.shape, bits, group_size)
        group_size = quantized.group_size
        largest = LARGEST_CODE[bits]
        weight = weight.float()
        norms = weight.norm(dim=-2).bfloat16()
        norms = norms.masked_fill(norms == 0, 1)
        weight = weight / norms.float()[..., None, :]
        groups = pad(weight, (0, -weight.shape[-1] % group_size)).unflatten(-1, (-1, group_size))
        scales = (groups.abs().amax(-1) / largest).bfloat16()
        _multiply_groups_(weight, scales.float().masked_fill(scales == 0, 1).reciprocal(), group_size)
        codes = weight.round_().clamp_(-largest, largest).to(torch.int8)
        quantized.codes = codes if bits == 8 else _pack(codes)
        quantized.scales, quantized.column_norms = scales, norms
        return quantized

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """
        Returns:
            `torch.Tensor`: The weight as numbers of `dtype`, rounded once.
        """
        wide = torch.promote_types(dtype, torch.float32)
        weight = self.codes.to(wide) if self.bits == 8 else _unpack(self.codes, self.shape).to(wide)
        _multiply_groups_(weight, self.scales.to(wide), self.group_size)
        return weight.mul_(self.column_norms.to(wide)[..., None, :]).to(dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, bits={self.bits}, group_size={self.group_size}"


def check_storage(bits: int, group_size: int) -> None:
    """Raise `ValueError`, naming the argument, if weights cannot be stored so."""
    if type(bits) is not int or bits not in LARGEST_CODE:
        raise ValueError(f"`bits` must be one of {sorted(LARGEST_CODE)}, got {bits!r}.")
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"`group_size` must be a positive integer, got {group_size!r}.")


def dense(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """A layer map's weight as a tensor of `dtype`, however it is stored."""
    return weight.dense(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def matrices(layer_map: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The plain weight matrices of a layer map, each with the module that holds it and its name there."""
    for module in layer_map.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and name != "bias":  # a bias for each head is no matrix
                yield module, name, parameter


def reserve_codes(layer_map: nn.Module, bits: int, group_size: int) -> nn.Module:
    """The same layer map, in place, with room for codes instead of weight matrices: to be loaded."""
    for module, name, weight in list(matrices(layer_map)):
        with torch.device(weight.device):
            _replace(module, name, QuantizedWeight(weight.shape, bits, group_size))
    return layer_map


def quantized(layer_map: nn.Module, bits: int, group_size: int) -> nn.Module:
    """A copy of a layer map with its weight matrices quantised. Biases and other vectors stay as they are."""
    other = copy.deepcopy(layer_map)
    for module, name, weight in list(matrices(other)):
        _replace(module, name, QuantizedWeight.from_dense(weight, bits, group_size))
    return other


def dequantized(layer_map: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a layer map, quantised or not, with plain weights of `dtype`."""
    other = copy.deepcopy(layer_map)
    for parent in list(other.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedWeight):
                delattr(parent, name)
                parent.register_parameter(name, nn.Parameter(child.dense(dtype)))
    return other.to(dtype)


def in_dtype(layer_map: nn.Module, dtype: torch.dtype, keep: bool) -> nn.Module:
    """
    The layer map itself if its weights are plain and of `dtype`, else a copy of which they are.

    Args:
        layer_map (`nn.Module`):
            The layer map.
        dtype (`torch.dtype`):
            What is wanted.
        keep (`bool`):
            Whether the copy is there for the next caller, as long as the layer map lives and its weights are not
            changed (not even in place, but for changes through `.data`, which leave no trace).
    """
    tensors = [*layer_map.parameters(), *layer_map.buffers()]
    plain = not any(isinstance(module, QuantizedWeight) for module in layer_map.modules())
    if plain and all(tensor.dtype == dtype for tensor in tensors):
        return layer_map
    if not keep or any(tensor.is_inference() for tensor in tensors):  # which do not tell of changes
        _PLAIN.pop(layer_map, None)
        return dequantized(layer_map, dtype)
    version = dtype, *((tensor.data_ptr(), tensor._version) for tensor in tensors)
    kept = _PLAIN.get(layer_map)
    if kept is None or kept[0] != version:
        kept = _PLAIN[layer_map] = version, dequantized(layer_map, dtype)
    return kept[1]


def num_bytes(module: nn.Module) -> int:
    """The number of bytes of a module's tensors, as they are saved. Also of one on the `meta` device."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


def _replace(module: nn.Module, name: str, weight: QuantizedWeight) -> None:
    delattr(module, name)
    setattr(module, name, weight)


def _multiply_groups_(weight: torch.Tensor, scales: torch.Tensor, group_size: int) -> None:
    """Multiply, in place, each group of a row by its scale; the last group may be shorter."""
    whole = weight.shape[-1] // group_size
    weight[..., : whole * group_size].unflatten(-1, (whole, group_size)).mul_(scales[..., :whole, None])
    weight[..., whole * group_size :].mul_(scales[..., whole:])


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes from -7 to 7, two in a byte, flat."""
    codes = (codes.flatten() + 8).to(torch.uint8)
    low, high = pad(codes, (0, codes.numel() % 2)).chunk(2)
    return low | (high << 4)


def _unpack(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    codes = torch.cat([packed & 15, packed >> 4])[: shape.numel()]
    return (codes.to(torch.int8) - 8).view(shape)

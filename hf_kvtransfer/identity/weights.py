"""Samples of a model's weights, by which copies of a checkpoint are known whatever floating point dtype they have."""

import base64
import hashlib
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from .tensors import ModelTensors, StoredTensor


# Of every tensor. One in each of as many equal stretches, so that no change of a long stretch passes unseen.
NUM_SAMPLES = 16

# From coarse to fine. Others are compared as bytes.
_PRECISION = ("bfloat16", "float16", "float32", "float64")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ON_DISK: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class TensorSample:
    """A few elements of a tensor, bit by bit as they are stored.

    Hashes would be shorter, but a rounded copy of a tensor could not be compared with it.

    Args:
        dtype (`str`):
            The dtype, such as `"bfloat16"`.
        shape (`tuple[int, ...]`):
            The shape of the whole tensor.
        quantization (`str`, *optional*):
            How it is quantised.
        elements (`bytes`):
            The elements.
    """

    dtype: str
    shape: tuple[int, ...]
    quantization: str | None
    elements: bytes

    def to_list(self) -> list:
        """JSON-friendly: the dtype, the shape, how it is quantised, and the elements in base64."""
        return [self.dtype, list(self.shape), self.quantization, base64.b64encode(self.elements).decode()]

    @classmethod
    def from_list(cls, entry: list) -> "TensorSample":
        """The inverse of [`~TensorSample.to_list`].

        Raises:
            `ValueError`: if it is not of that form.
        """
        try:
            dtype, shape, quantization, text = entry
            elements = base64.b64decode(text, validate=True)
            # `type`, because True is an int too.
            valid = isinstance(quantization, str | None) and all(type(size) is int and size >= 0 for size in shape)
            valid = valid and len(elements) == _num_samples(shape) * getattr(torch, dtype).itemsize
        except (AttributeError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"The sample of a tensor is damaged: {entry!r:.200}")
        return cls(dtype, tuple(shape), quantization, elements)


Samples = Mapping[str, TensorSample]


def sample_weights(tensors: ModelTensors) -> dict[str, TensorSample]:
    """As [`sample_tensors`], the weights of a model, those that are tied once."""
    samples = sample_tensors(tensors.weights)
    copies = sample_tensors({name: tensors.weights[source] for name, source in tensors.tied.items()})
    return {name: sample for name, sample in samples.items() if copies.get(name) != sample}


def sample_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorSample]:
    """
    Read a few elements of each tensor, at places that depend on its name and number of elements only.

    What accelerate keeps on disk is read once for each model; all else at each call.

    Args:
        tensors (`Mapping[str, StoredTensor]`):
            The tensors, on any devices. Each device is read from once.

    Returns:
        `dict[str, TensorSample]`: a sample of each.
    """
    samples: dict[str, TensorSample] = {}
    groups: dict[tuple, dict[str, StoredTensor]] = defaultdict(dict)
    for name, stored in tensors.items():
        if stored.offloaded is not None:
            samples[name] = _sample_offloaded(name, stored)
        else:
            groups[stored.tensor.device, stored.tensor.dtype.itemsize][name] = stored
    for (device, size), group in groups.items():
        places = [_places(name, stored.tensor.shape) for name, stored in group.items()]
        index = torch.tensor([place for some in places for place in some], dtype=torch.long).to(device)
        taken = [
            # As integers: not every dtype can be indexed everywhere.
            stored.tensor.detach().as_subclass(torch.Tensor).view(_BITS[size]).reshape(-1)[some]
            for stored, some in zip(group.values(), index.split([*map(len, places)]), strict=True)
        ]
        elements = torch.cat(taken).cpu().numpy().tobytes()
        begin = 0
        for (name, stored), some in zip(group.items(), places, strict=True):
            end = begin + len(some) * size
            samples[name] = _sample(stored, elements[begin:end])
            begin = end
    return {name: samples[name] for name in tensors}


def _sample_offloaded(name: str, stored: StoredTensor) -> TensorSample:
    place = stored.offloaded
    assert place is not None
    known = _ON_DISK.setdefault(place.hook, {}) if place.on_disk else {}
    if name not in known:
        taken = place.load().detach().flatten()[list(_places(name, stored.tensor.shape))]
        # accelerate gives what it loads the dtype of the parameter that it is for.
        taken = taken.to(stored.tensor.dtype).cpu().view(torch.uint8)
        known[name] = _sample(stored, taken.numpy().tobytes())
    return known[name]


def _sample(stored: StoredTensor, elements: bytes) -> TensorSample:
    tensor = stored.tensor
    return TensorSample(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), stored.quantization, elements)


def _num_samples(shape: Sequence[int]) -> int:
    return min(prod(shape), NUM_SAMPLES)


@lru_cache(maxsize=2**14)
def _places(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    numel = prod(shape)
    if numel <= NUM_SAMPLES:
        return tuple(range(numel))
    # Not from torch's generators, which may draw other numbers in another version.
    draws = struct.unpack(f"<{NUM_SAMPLES}Q", hashlib.shake_128(name.encode()).digest(8 * NUM_SAMPLES))
    bounds = [i * numel // NUM_SAMPLES for i in range(NUM_SAMPLES + 1)]
    return tuple(start + draw % (stop - start) for start, stop, draw in zip(bounds, bounds[1:], draws, strict=False))


def compare_samples(expected: Samples, found: Samples, tolerance: float = 0.0) -> Iterator[tuple[str, str]]:
    """
    Tell copies of the same tensors, each in its own dtype, from other tensors.

    Elements of one dtype must be the same bits. Else the finer ones must round to the coarser ones; bfloat16 and
    float16, each of which is the coarser one somewhere, agree if there is a number that rounds to both.

    Args:
        expected (`Mapping[str, TensorSample]`):
            Samples of the tensors that something is known about.
        found (`Mapping[str, TensorSample]`):
            Samples of the tensors at hand.
        tolerance (`float`, *optional*, defaults to 0):
            The relative difference between numbers that count as the same: for what is computed and not stored.

    Returns:
        `Iterator[tuple[str, str]]`: at most once `"changed"` and at most once `"unverified"`, each with what it is
        about. Tensors that are quantised in two ways, or on one side only, cannot be verified.
    """
    both = [name for name in expected if name in found]
    alike = [name for name in both if expected[name].quantization == found[name].quantization]
    unlike = [name for name in both if expected[name].quantization != found[name].quantization]
    reshaped = [name for name in alike if expected[name].shape != found[name].shape]
    pairs = {name: (expected[name], found[name]) for name in alike if expected[name].shape == found[name].shape}
    changed = _disagreeing(pairs, tolerance)
    missing = [name for name in expected if name not in found]
    added = [name for name in found if name not in expected]
    ways = _quantizations(expected), _quantizations(found)
    # A quantised layer may keep its weight under another name, and scales beside it.
    if missing + added and ways[0] != ways[1]:
        unlike, missing, added = unlike + missing + added, [], []
    details = []
    if changed:
        details.append(_some(changed, "differs", "differ"))
    if reshaped:
        name = reshaped[0]
        shapes = f"{list(found[name].shape)}, not {list(expected[name].shape)}"
        details.append(f"{_some(reshaped, 'has', 'have')} another shape ({shapes})")
    if missing:
        details.append(_some(missing, "is missing", "are missing"))
    if added:
        details.append(_some(added, "is new", "are new"))
    if details:
        yield "changed", "; ".join(details)
    if unlike:
        detail = _some(unlike, "is stored in another way", "are stored in another way")
        yield "unverified", f"{detail} ({ways[1]}, not {ways[0]}) and cannot be compared"


def _disagreeing(pairs: Mapping[str, tuple[TensorSample, TensorSample]], tolerance: float) -> list[str]:
    """The names of the pairs that cannot be of one tensor. All pairs of the same two dtypes are compared at once."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    wrong = set()
    for name, (expected, found) in pairs.items():
        if expected.elements == found.elements and (expected.dtype == found.dtype or not expected.elements):
            continue
        if {expected.dtype, found.dtype} <= set(_PRECISION) and (tolerance or expected.dtype != found.dtype):
            groups[expected.dtype, found.dtype].append(name)
        else:
            wrong.add(name)
    for dtypes, names in groups.items():
        coarse, fine = (
            torch.frombuffer(
                bytearray().join(pairs[name][side].elements for name in names), dtype=getattr(torch, dtypes[side])
            )
            for side in sorted((0, 1), key=lambda side: _PRECISION.index(dtypes[side]))
        )
        owners = [name for name in names for _ in range(_num_samples(pairs[name][0].shape))]
        apart = ~_agree(coarse, fine, tolerance)
        wrong.update(owners[i] for i in apart.nonzero().flatten().tolist())
    return [name for name in pairs if name in wrong]


def _agree(coarse: torch.Tensor, fine: torch.Tensor, tolerance: float) -> torch.Tensor:
    """For each of two numbers, whether they can be roundings of one number."""
    first, second = coarse.double(), fine.double()
    if (coarse.dtype, fine.dtype) == (torch.bfloat16, torch.float16):
        same = _round_from_one_number(first, second)
    else:
        same = fine.to(coarse.dtype) == coarse
    if tolerance:
        # Numbers that nearly agree may have been rounded apart.
        allowed = tolerance + (0 if coarse.dtype == fine.dtype else torch.finfo(coarse.dtype).eps)
        same = same | ((first - second).abs() <= allowed * first.abs())
    return same | (first.isnan() & second.isnan())


def _round_from_one_number(bfloat16: torch.Tensor, float16: torch.Tensor) -> torch.Tensor:
    """Whether there is a number that rounds to both, as after two conversions of one float32 checkpoint."""
    reach = _spacing(bfloat16, 7, -126) / 2
    near = (bfloat16 - float16).abs() <= reach + _spacing(float16, 10, -14) / 2
    # What is too large for float16 is infinite there: from half a step above its largest number on.
    overflown = float16.isinf() & (bfloat16.sign() == float16.sign())
    return near | (overflown & (bfloat16.abs() + reach >= torch.finfo(torch.float16).max + 16))


def _spacing(values: torch.Tensor, mantissa_bits: int, min_exponent: int) -> torch.Tensor:
    """The distance between neighbouring floating point numbers around each value."""
    exponents = torch.where(values == 0, min_exponent, torch.frexp(values).exponent - 1)
    return torch.ldexp(torch.ones_like(values), exponents.clamp(min=min_exponent) - mantissa_bits)


def _quantizations(samples: Samples) -> str:
    return ", ".join(sorted({sample.quantization for sample in samples.values() if sample.quantization})) or "plain"


def _some(names: list[str], one: str, several: str) -> str:
    others = f" and {len(names) - 1} other{'s' if len(names) > 2 else ''}" if len(names) > 1 else ""
    return f"{names[0]}{others} {several if others else one}"

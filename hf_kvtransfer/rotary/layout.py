"""How one layer rotates its keys: found by trying the known layouts on keys that the model itself has made."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import UnsupportedModelError
from ..probe import LayerProbe


# How a module's cos and sin columns stand for frequencies: cat(f, f), repeat_interleave(f, 2), f.
Columns = Literal["halves", "pairs", "single"]


@dataclass(frozen=True)
class LayerRotary:
    """How one layer rotates its keys.

    Args:
        layout (`str`):
            `"none"`, `"half"` (channel i turns with channel i + rotary_dim / 2) or `"interleaved"` (2i with 2i + 1).
        offset (`int`):
            The first rotated channel of a head.
        rotary_dim (`int`):
            The number of rotated channels of a head.
        columns (`str`):
            How cos and sin of the model's rotary module are laid out.
        call_idx (`int`, *optional*):
            Which of the model's rotary calls makes its cos and sin. `None` if it does not rotate.
    """

    layout: Literal["none", "half", "interleaved"]
    offset: int = 0
    rotary_dim: int = 0
    columns: Columns = "halves"
    call_idx: int | None = None


def turn(
    key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: LayerRotary, out: torch.Tensor
) -> torch.Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = _parts(key_states, layer)
    first, second = first.float(), second.float()
    out_first, out_second = _parts(out, layer)
    end = layer.offset + layer.rotary_dim
    if out.dtype == torch.float32 and out.untyped_storage()._cdata != key_states.untyped_storage()._cdata:
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    else:
        # Both parts exist before anything is written: `out` may be `key_states`.
        turned_first = (first * cos).addcmul_(second, sin, value=-1)
        turned_second = (second * cos).addcmul_(first, sin)
        out_first.copy_(turned_first)
        out_second.copy_(turned_second)
    out[..., : layer.offset].copy_(key_states[..., : layer.offset])
    out[..., end:].copy_(key_states[..., end:])
    return out


def _parts(key_states: torch.Tensor, layer: LayerRotary) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = key_states[..., layer.offset : layer.offset + layer.rotary_dim]
    if layer.layout == "interleaved":
        return rotated[..., 0::2], rotated[..., 1::2]
    return rotated[..., : layer.rotary_dim // 2], rotated[..., layer.rotary_dim // 2 :]


def compact(table: torch.Tensor, columns: Columns) -> torch.Tensor:
    if columns == "halves":
        table = table[..., : table.shape[-1] // 2]
    elif columns == "pairs":
        table = table[..., 0::2]
    return table.float().contiguous()


def _candidates(head_dim: int, width: int, call_idx: int) -> list[LayerRotary]:
    candidates = []
    rotary_dims: dict[Columns, int] = {"halves": width, "pairs": width, "single": 2 * width}
    layouts: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    for columns, rotary_dim in rotary_dims.items():
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            continue
        for layout in layouts:
            for offset in sorted({0, head_dim - rotary_dim}):
                candidates.append(LayerRotary(layout, offset, rotary_dim, columns, call_idx))
    return candidates


def detect(
    layer: LayerProbe, layer_idx: int, call_idx: int | None, layers: list[LayerRotary | None], model_class: str
) -> LayerRotary:
    where = f"Layer {layer_idx} of {model_class}"
    if layer.depends_on_position_ids:
        raise UnsupportedModelError(
            f"{where} rotates its keys inside its attention, from position ids and with no module to ask for cos and "
            "sin, so its keys cannot be moved to other positions. Re-prefill this model."
        )
    pre, post = layer.unrotated_key_states, layer.key_states
    tolerance = max(1e-3, torch.finfo(post.dtype).eps)
    if call_idx is None or layer.position_embeddings is None:
        return LayerRotary("none")
    if _relative_error(layer.unrotated_value_states, layer.value_states) > tolerance:
        raise UnsupportedModelError(
            f"{where} caches a compressed latent (MLA), with the rotary embedding in the place of the values, instead "
            "of keys and values token by token. Re-prefill this model."
        )
    if _relative_error(pre, post) <= tolerance:
        return LayerRotary("none")

    # The layers of a model are alike: what fitted the last one that rotates is tried first.
    known = [(other.columns, other.layout) for other in layers if other is not None and other.layout != "none"][-1:]
    candidates = _candidates(post.shape[-1], layer.position_embeddings[0].shape[-1], call_idx)
    candidates.sort(key=lambda candidate: (candidate.columns, candidate.layout) not in known)
    scratch = torch.empty_like(post, dtype=torch.float32)
    best, best_error = None, float("inf")
    for candidate in candidates:
        cos, sin = (compact(t, candidate.columns) for t in layer.position_embeddings)
        scale = cos.square() + sin.square()
        error = max(
            _relative_error(turn(pre, cos, sin, candidate, scratch), post),
            _relative_error(turn(post, cos / scale, -sin / scale, candidate, scratch), pre),
        )
        if error < best_error:
            best, best_error = candidate, error
        if error <= tolerance:
            break
    if best is None or not best_error <= tolerance:
        raise UnsupportedModelError(
            f"{where} rotates its keys in a way that is not known: the closest ({best and best.layout}) is off by "
            f"{best_error:.2g} of the keys, where {tolerance:.2g} is rounding. Re-prefill this model."
        )
    return best


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    if expected.numel() == 0:
        return 0.0
    scale = expected.square().mean().sqrt()
    return ((actual - expected).square().mean().sqrt() / scale.clamp_min(1e-30)).item()

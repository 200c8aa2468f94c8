"""Adapters of PEFT are switched in place: which are at work in a model, and did these fill its cache?"""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .compat import filled_cache, unwrap
from .errors import PairMismatchError, SourceCacheError
from .geometry import KVGeometry
from .identity.tensors import active_adapters, is_wrapper


# First tokens that are read again. What follows cannot have changed them.
_NUM_TOKENS = 8

# Relative difference between keys, or values, of two readings of a token that is still rounding. In SmolLM2, which has
# 30 layers, rounding makes 2e-6 in float32 and up to 0.02 in bfloat16; LoRAs that were trained for 40 steps make 0.03
# to 0.08 if they are on the MLPs of its last ten layers, and 0.2 to 0.3 if they are everywhere.
_TOLERANCE = {torch.float64: 5e-3, torch.float32: 5e-3, torch.float16: 2e-2}
_COARSE_TOLERANCE = 5e-2


def adapters_at_work(model: PreTrainedModel) -> tuple[tuple[str, ...], ...]:
    """The adapters that each module that PEFT has wrapped applies now; none while they are disabled or merged."""
    return tuple(tuple(active_adapters(module)) for module in unwrap(model).modules() if is_wrapper(module))


class TargetAdapters:
    """
    The adapters that were at work in a target when a request was bound.

    Args:
        target (`PreTrainedModel`):
            The model that will continue.
    """

    def __init__(self, target: PreTrainedModel):
        self._target, self._bound = target, adapters_at_work(target)

    def check(self) -> None:
        """Raise [`PairMismatchError`] if others are at work now."""
        found = adapters_at_work(self._target)
        if found != self._bound:
            raise PairMismatchError(
                f"The target continues with {_names(found)}, the cache was made for {_names(self._bound)}. Call "
                "`set_adapter` before the cache is made, and leave it until the answer is there."
            )


def check_filled_with_adapters(
    cache: Cache,
    model: PreTrainedModel,
    geometry: KVGeometry,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
) -> None:
    """
    Raise [`SourceCacheError`] unless the adapters that are at work in a model now are those that filled its cache.

    A cache does not say. So the model reads the first 8 tokens of each row again, if there are adapters in it at all,
    and most of their keys and values must be the same in every layer. In bfloat16 an adapter that changes them by less
    than 5 % passes unseen.

    Args:
        cache (`Cache`):
            What the model has filled. It holds every token.
        model (`PreTrainedModel`), geometry ([`KVGeometry`]):
            The model, and what it caches.
        input_ids (`torch.LongTensor`), attention_mask (`torch.LongTensor`), position_ids (`torch.LongTensor`):
            `[batch, tokens]`, left-padded.
    """
    found = adapters_at_work(model)
    if not found:
        return
    input_ids, position_ids = input_ids.cpu(), position_ids.cpu()
    first, last = input_ids.shape[1] - attention_mask.sum(-1).cpu(), input_ids.shape[1]
    translated = getattr(cache, "translated_mask", None)
    if translated is not None and translated.any():  # those that another model has read say nothing about this one
        last = int(translated.any(0).nonzero()[0])
    num_tokens = min(_NUM_TOKENS, last - int(first.max()))
    if num_tokens < 1:
        return
    columns = first[:, None] + torch.arange(num_tokens)
    again = filled_cache(model, input_ids.gather(1, columns), position_ids.gather(1, columns))
    for layer_idx, layer in enumerate(geometry.layers):
        if layer is None:
            continue
        for what in ("keys", "values"):
            states, held = (getattr(side.layers[layer_idx], what) for side in (again, cache))
            index = columns.to(held.device)[:, None, :, None].expand(-1, *held.shape[1:2], -1, held.shape[3])
            held = held.detach().gather(2, index).to(states.device, torch.float32)
            sizes = held.norm(dim=(1, 3)).clamp(min=torch.finfo(torch.float32).tiny)
            # The median: in a mixture of experts rounding sends single tokens to others.
            apart = ((states.float() - held).norm(dim=(1, 3)) / sizes).median().item()
            if not apart <= _TOLERANCE.get(states.dtype, _COARSE_TOLERANCE):
                raise SourceCacheError(
                    f"The source cache was filled with other adapters than {_names(found)} of its model, or other "
                    f"weights: of the first {num_tokens} tokens the model now makes {what} in layer {layer_idx} that "
                    f"are {apart:.1%} away. Activate what has read them before the cache is passed on, or make the "
                    "`SourceKV` before adapters are switched. `model.eval()` turns off what is random."
                )


def _names(found: tuple[tuple[str, ...], ...]) -> str:
    names = sorted({name for adapters in found for name in adapters})
    return f"adapter {' and '.join(names)}" if names else "no adapter"

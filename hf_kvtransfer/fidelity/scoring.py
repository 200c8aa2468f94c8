"""How the target continues on a cache, and how that compares with how it continues on its own."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from ..compat import read_into_cache
from ..errors import EvaluationDataError
from .data import Passage
from .readout import attention_outputs
from .results import ArmScore


# Log-probabilities of which the divergence is taken at a time, so that its temporaries stay small.
_BLOCK = 2**23


@dataclasses.dataclass
class Reading:
    """
    What the target made of a passage's continuations.

    Args:
        log_probs (`torch.Tensor`):
            For each token of the labelled continuation the prediction of it, `[positions, vocab_size]`.
        attention (`list[torch.Tensor]`):
            For each layer that caches its attention output there, `[positions, hidden_size]`.
        chosen (`int`, *optional*):
            The continuation with the highest log-probability per character, `None` if there is only one.
    """

    log_probs: torch.Tensor
    attention: list[torch.Tensor]
    chosen: int | None


def read_continuations(target: PreTrainedModel, cache: DynamicCache, passage: Passage, tail: list[int]) -> Reading:
    """
    Let the target read the end of a context and the continuations behind it, each in a row of one batch.

    Args:
        target (`PreTrainedModel`):
            The model that continues.
        cache (`DynamicCache`):
            The context before, in one row. It is used up.
        passage ([`Passage`]):
            Whose continuations are scored.
        tail (`list[int]`):
            The context's last ids, those that the cache does not hold.
    """
    continuations = passage.continuations
    with attention_outputs(target) as outputs:
        logits = continuation_logits(target, cache, tail, continuations)
    chosen = None
    if len(continuations) > 1:
        totals = [
            -F.cross_entropy(row[: len(ids)], torch.tensor(ids, device=row.device), reduction="sum").item()
            for row, ids in zip(logits, continuations, strict=True)
        ]
        per_character = [total / max(count, 1) for total, count in zip(totals, passage.characters, strict=True)]
        chosen = per_character.index(max(per_character))
    scored = slice(len(tail) - 1, len(tail) - 1 + len(continuations[passage.label]))
    return Reading(
        logits[passage.label, : len(continuations[passage.label])].log_softmax(-1),
        [output[passage.label, scored].float() for output in outputs],
        chosen,
    )


def continuation_logits(
    target: PreTrainedModel, cache: DynamicCache, tail: list[int], continuations: Sequence[list[int]]
) -> torch.Tensor:
    """
    Let the target read the end of a context and several continuations behind it, each in a row of one batch.

    Args:
        target (`PreTrainedModel`):
            The model that continues.
        cache (`DynamicCache`):
            The context before, in one row. It is used up.
        tail (`list[int]`):
            The context's last ids, those that the cache does not hold, at least one.
        continuations (`Sequence[list[int]]`):
            Ids of the continuations.

    Returns:
        `torch.Tensor`: For each token of each continuation the prediction of it, in float32,
        `[continuations, tokens, vocab_size]`. Rows of shorter continuations end in something.
    """
    positions = max(map(len, continuations))
    # Padding is on the right, where no scored token sees it.
    input_ids = torch.zeros(len(continuations), len(tail) + positions - 1, dtype=torch.long)
    for row, ids in zip(input_ids, continuations, strict=True):
        row[: len(tail) + len(ids) - 1] = torch.tensor(tail + ids[:-1])
    if len(continuations) > 1:
        cache.batch_repeat_interleave(len(continuations))
    return read_into_cache(target, cache, input_ids, num_logits=positions)


def compare(arm: str, reading: Reading, native: Reading, passage: Passage) -> ArmScore:
    """
    Score an arm against the native one.

    Args:
        arm (`str`):
            Its name.
        reading ([`Reading`]), native ([`Reading`]):
            How the target continued in this arm, and natively. The native arm is compared with itself.
        passage ([`Passage`]):
            Which continuation is the right one.

    Raises:
        `EvaluationDataError`: a figure is not finite.
    """
    log_probs, native_log_probs = reading.log_probs, native.log_probs
    reference = torch.tensor(passage.continuations[passage.label], device=log_probs.device)
    loss = -log_probs.gather(-1, reference[:, None]).double().sum().item()
    agreement = int((log_probs.argmax(-1) == native_log_probs.argmax(-1)).sum())
    kl, block = 0.0, max(1, _BLOCK // log_probs.shape[-1])
    for part, native_part in zip(log_probs.split(block), native_log_probs.split(block), strict=True):
        probs = native_part.exp()
        # What the native arm excludes does not count, whatever the other arm makes of it.
        kl += torch.where(probs > 0, probs * (native_part - part), 0).sum(-1).double().sum().item()
    cosine = [
        F.cosine_similarity(a, b, dim=-1).mean().item()
        for a, b in zip(reading.attention, native.attention, strict=True)
        if arm != "native"
    ]
    if not all(map(math.isfinite, (loss, kl, *cosine))):
        raise EvaluationDataError(
            f"In arm {arm!r} the target has a loss of {loss} nats and a divergence of {kl} from its own prefill: its "
            "states overflow. Load both models in float32 or bfloat16."
        )
    # Rounding can leave a divergence of 0 a little below it.
    return ArmScore(len(reference), loss, agreement, max(kl, 0.0), cosine, reading.chosen)

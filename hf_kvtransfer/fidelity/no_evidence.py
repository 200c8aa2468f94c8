"""What speaks against a mapper that nobody has measured."""

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_policy import cache_policy
from ..exactness import exact_layers
from ..identity import ModelIdentity
from ..mapper import KVMapper
from ..source import SourceKV


NO_EVIDENCE = (
    "it has no evidence (fidelity.json): nobody has measured what it is worth. Run `hf-kvtransfer evaluate`, or "
    "`evaluate_mapper`, on text of your own"
)


def without_evidence(
    mapper: KVMapper,
    source: PreTrainedModel | SourceKV | None,
    target: PreTrainedModel | None,
    target_cache: Cache | None,
) -> list[str]:
    """
    What speaks against a mapper that nobody has measured: nothing, if it copies layers that are the same in both
    models. That is no claim of the mapper's: it is looked at in the models themselves, each time.
    """
    if source is None or target is None or not mapper.config.copies_layers:
        return [NO_EVIDENCE]
    if isinstance(source, SourceKV):
        identity, policies = source.identity, {"source": source.cache_policy or {}}
        firsts = zip(source.position_ids, source.attention_mask.bool(), strict=True)
        if any(positions[mask][:1].any() for positions, mask in firsts):
            return [f"the source has read more before these tokens, and {NO_EVIDENCE}"]
    else:
        identity, policies = ModelIdentity.from_model(source), {"source": cache_policy(source)}
    policies["target"] = cache_policy(target if target_cache is None else target_cache)
    exact = exact_layers(identity, target).layers
    others = [i for i in mapper.config.mapped_layers if i not in exact]
    if others:
        same = "no layer is" if not exact else f"layers {exact[0]} to {exact[-1]} are"
        return [f"{same} the same in both models, and of layers {others[0]} to {others[-1]} {NO_EVIDENCE}"]
    return [
        f"the {side}'s cache is {key}, and {NO_EVIDENCE}"
        for side, policy in policies.items()
        for key in ("quantized", "evicting")
        if policy.get(key)
    ]

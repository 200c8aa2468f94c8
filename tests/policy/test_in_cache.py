"""`TranslatedCache(policy=)`."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import RefusedError, SourceKV, TransferPolicy, TranslatedCache

from ..tiny_models import identity_mapper, random_ids, ungated_cache
from .test_policy import COSTS


POLICY = TransferPolicy(COSTS)
BREAK_EVEN = POLICY.decide(1).break_even_tokens


def test_short_context_is_read_again(llama, recwarn):
    ids = random_ids(llama, 1, BREAK_EVEN - 1)
    source_kv = SourceKV.prefill(llama, None, ids)
    cache = TranslatedCache(source_kv, identity_mapper(llama), llama, policy=POLICY)
    assert cache.get_seq_length() == 0
    assert cache.report.outcome == "recomputed"
    (reason,) = cache.report.reasons
    assert reason.startswith("recompute: ") and f"worth it from {BREAK_EVEN} tokens on" in reason
    expected = llama.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(
        llama.generate(**cache.prepare({"input_ids": ids}), max_new_tokens=3, do_sample=False), expected
    )


def test_long_context_is_translated(llama):
    source_kv = SourceKV.prefill(llama, None, random_ids(llama, 1, BREAK_EVEN))
    cache = ungated_cache(source_kv, identity_mapper(llama), llama, policy=POLICY)
    assert cache.report.translated_tokens > 0


def test_tokens_that_are_read_again_count(llama):
    source_kv = SourceKV.prefill(llama, None, random_ids(llama, 1, BREAK_EVEN))
    with pytest.raises(RefusedError, match="A handoff is not worth it"):
        ungated_cache(source_kv, identity_mapper(llama), llama, policy=POLICY, effort=0.15)


def test_rows_share_what_a_handoff_takes_anyway(llama):
    ids = random_ids(llama, 2, BREAK_EVEN - 1)
    cache = ungated_cache(SourceKV.prefill(llama, None, ids), identity_mapper(llama), llama, policy=POLICY)
    assert cache.report.translated_tokens > 0


@pytest.mark.parametrize("dim", [1, 2])
def test_plain_cache_of_one_row(llama, dim):
    """It is not even made portable if it is not worth it."""
    ids = random_ids(llama, 1, 8)
    given = {"source_model": llama, "source_input_ids": ids if dim == 2 else ids[0]}
    with pytest.raises(RefusedError, match="A handoff is not worth it: 8 tokens take"):
        ungated_cache(DynamicCache(config=llama.config), identity_mapper(llama), llama, policy=POLICY, **given)

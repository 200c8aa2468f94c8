"""Models whose state is not keys and values token by token: refused by name before a token is generated."""

import pytest
import torch

from hf_kvtransfer import FidelityGate, SourceKV, TranslatedCache, UnsupportedModelError
from hf_kvtransfer.compat import cache_argument

from ..tiny_models import random_ids
from .case import Case


# ml-explore/mlx-lm#980, transformers#46190, ROCm/ATOM#1759, transformers#46439, transformers#46441,
# transformers#40827
def test_as_a_source(unsupported, record_property):
    with pytest.raises(UnsupportedModelError, match=type(unsupported).__name__) as info:
        SourceKV.prefill(unsupported, None, random_ids(unsupported, 1, 12))
    record_property("cell", f"refused: {info.value}")


# ml-explore/mlx-lm#980, transformers#46190, ROCm/ATOM#1759, transformers#46439, transformers#46441,
# transformers#40827
def test_as_a_target(unsupported, record_property):
    llama = Case.of("llama")
    arguments = llama.source_kv(1), llama.mapper, unsupported
    options = {"gate": FidelityGate(strict=False)}
    with pytest.raises(UnsupportedModelError, match=type(unsupported).__name__) as info:
        TranslatedCache(*arguments, on_refusal="raise", **options)
    record_property("cell", f"refused: {info.value}")
    cache = TranslatedCache(*arguments, **options)
    assert cache.report.outcome == "recomputed"
    given = {cache_argument(unsupported): cache, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(
        unsupported.generate(llama.prompt, **given),
        unsupported.generate(llama.prompt, max_new_tokens=3, do_sample=False),
    )

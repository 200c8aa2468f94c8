"""The job itself, on the two demo models and the shipped mapper."""

import runpy
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import measure
from hf_kvtransfer import KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.demo_models import load_demo_model

from .tiny_models import identity_mapper


ROOT = Path(__file__).parents[1]
STORY = (ROOT / "examples" / "harbour.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def smollm2():
    return load_demo_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def gemma():
    return load_demo_model("gemma-3-270m")


@pytest.fixture(scope="module")
def mapper():
    return KVMapper.from_pretrained(ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m", dtype=torch.float32)


def test_most_of_the_gap_is_recovered(smollm2, gemma, mapper):
    texts = [STORY, *((ROOT / name).read_text(encoding="utf-8") for name in ("mappers/README.md", "LICENSE"))]
    arms = measure(*smollm2, *gemma, mapper, texts, context=256, continuation=64)["arms"]
    assert arms["translated"]["gap_recovered"] > 0.6
    assert arms["translated"]["agreement"] > arms["no context"]["agreement"] + 0.1
    assert arms["another document"]["gap_recovered"] < 0.1


def test_gemma_continues_a_padded_batch_with_beams(smollm2, gemma, mapper):
    (source, source_tokenizer), (target, target_tokenizer) = smollm2, gemma
    contexts = [STORY[:700], STORY[:300]]
    source_kv = SourceKV.prefill(source, source_tokenizer, contexts)
    prompts = target_tokenizer(
        [context + " It was" for context in contexts], return_tensors="pt", padding=True, padding_side="left"
    )
    cache = TranslatedCache(
        source_kv,
        mapper,
        target,
        target_tokenizer=target_tokenizer,
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
    )
    assert cache.report.coverage == 1
    assert cache.report.boundary_share > 0.9
    # The contexts end at one column, and all but their last token is covered.
    assert cache.report.held_back_tokens == 2
    output = target.generate(**cache.prepare(prompts), max_new_tokens=6, num_beams=2, do_sample=False)
    assert output.shape == (2, prompts.input_ids.shape[1] + 6)


def test_gemma_on_its_own_cache_beyond_its_window(gemma):
    """Keys of a real model, un-rotated and rotated again, in sliding and full layers."""
    model, tokenizer = gemma
    ids = tokenizer(STORY, return_tensors="pt").input_ids[:, :600]
    assert ids.shape[1] == 600 > model.config.sliding_window
    source_kv = SourceKV.prefill(model, None, ids)
    cache = TranslatedCache(source_kv, identity_mapper(model), model)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    native = model.generate(ids, **options)
    translated = model.generate(ids, **options, **{cache_argument(model): cache})
    assert torch.equal(native.sequences, translated.sequences)
    torch.testing.assert_close(torch.stack(translated.logits), torch.stack(native.logits), rtol=0, atol=2e-3)


def test_quickstart(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("nats/token") == 3

"""Mappers between a model and its adapters: which layers are exact, and that they are."""

import copy

import pytest
import torch
from torch import nn

from hf_kvtransfer import (
    FidelityGate,
    KVMapper,
    PairMismatchError,
    RefusedError,
    Segment,
    SourceCacheError,
    SourceKV,
    TranslatedCache,
    UnsupportedModelError,
    adapter_mapper,
    generate,
)
from hf_kvtransfer.exactness import exact_layers
from hf_kvtransfer.identity import ModelIdentity
from hf_kvtransfer.layer_table import layer_table

from .tiny_models import random_ids, tiny_model


peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CONTEXT = 24
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapted(model, modules, name="default", seed=0, **options):
    """A copy of a model with a LoRA that does something."""
    wrapped = copy.deepcopy(model)
    wrapped = peft.get_peft_model(wrapped, peft.LoraConfig(target_modules=modules, r=4, **options), adapter_name=name)
    return randomized(wrapped, name, seed)


def randomized(wrapped, name, seed=0):
    torch.manual_seed(seed)
    for key, parameter in wrapped.named_parameters():
        if name in key.split(".") and "lora_" in key:
            nn.init.normal_(parameter, std=0.3)
    return wrapped.eval()


def states(model, ids):
    kv = SourceKV.prefill(model, None, ids)
    return kv.features


def same_layers(source, target):
    """Layers whose keys and values are the same bits on random tokens."""
    ids = random_ids(source, 2, CONTEXT)
    pairs = zip(states(source, ids), states(target, ids), strict=True)
    return tuple(i for i, (a, b) in enumerate(pairs) if torch.equal(a, b))


@pytest.mark.parametrize(
    ("modules", "layers", "exact"),
    [
        (MLP, None, (0,)),
        (["up_proj"], [2, 3], (0, 1, 2)),
        (["o_proj"], [1], (0, 1)),
        (["q_proj"], [1], (0, 1)),
        (["q_proj", "up_proj"], [1], (0, 1)),
        (["q_proj", "v_proj"], [1], (0,)),
        (["k_proj"], [3], (0, 1, 2)),
        (["v_proj"], None, ()),
        (["q_proj", "o_proj", *MLP], [3], (0, 1, 2, 3)),
        (["embed_tokens"], None, ()),
        (["lm_head"], None, (0, 1, 2, 3)),
    ],
)
def test_which_layers_are_exact(llama, modules, layers, exact):
    model = adapted(llama, modules, layers_to_transform=layers)
    assert exact_layers(ModelIdentity.from_model(llama), model).layers == exact
    assert same_layers(llama, model) == exact
    assert exact_layers(ModelIdentity.from_model(model), llama).layers == exact
    with model.disable_adapter():
        assert exact_layers(ModelIdentity.from_model(llama), model).layers == (0, 1, 2, 3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral"])
def test_in_other_families(family):
    model = tiny_model(family)
    wrapped = adapted(model, ["q_proj", "o_proj"], layers_to_transform=[2, 3])
    assert exact_layers(ModelIdentity.from_model(model), wrapped).layers == same_layers(model, wrapped) == (0, 1, 2)


def test_fused_experts():
    model = tiny_model("mixtral")
    experts = {"target_parameters": ["layers.2.mlp.experts.gate_up_proj"]}
    wrapped = adapted(model, [], **experts)
    assert exact_layers(ModelIdentity.from_model(model), wrapped).layers == same_layers(model, wrapped) == (0, 1, 2)


@pytest.mark.parametrize(
    ("saved", "exact"),
    [("model.norm", (0, 1, 2, 3)), ("model.layers.2.input_layernorm", (0, 1)), ("lm_head", (0, 1, 2, 3))],
)
def test_modules_that_were_trained_whole(llama, saved, exact):
    model = adapted(llama, ["o_proj"], layers_to_transform=[3], modules_to_save=[saved])
    for key, parameter in model.named_parameters():
        if "modules_to_save" in key:
            parameter.data.mul_(1.5)
    assert exact_layers(ModelIdentity.from_model(llama), model).layers == exact


def test_merged_adapters_and_fine_tunes(llama):
    merged = adapted(llama, MLP, layers_to_transform=[1]).merge_and_unload()
    assert exact_layers(ModelIdentity.from_model(llama), merged).layers == same_layers(llama, merged) == (0, 1)
    rounded = copy.deepcopy(llama).to(torch.bfloat16).float()
    assert exact_layers(ModelIdentity.from_model(llama), rounded).layers == ()


def test_an_exact_mapper_is_admitted_without_evidence(llama):
    model = adapted(llama, ["q_proj", *MLP], layers_to_transform=[3])
    ids = random_ids(llama, 2, CONTEXT + 4)
    source_kv = SourceKV.prefill(llama, None, ids[:, :CONTEXT])
    mapper = adapter_mapper(source_kv, model)
    assert mapper.config.fit["exact_layers"] == [0, 1, 2, 3]
    assert mapper.config.fit["changed"] == [
        f"model.layers.3.{name}" for name in ("self_attn.q_proj", *(f"mlp.{name}" for name in MLP))
    ]
    cache = TranslatedCache(source_kv, mapper, model, input_ids=ids, on_refusal="raise")
    output = generate(model, {"input_ids": ids}, cache, max_new_tokens=6, do_sample=False)
    assert cache.report.translated_tokens > 0
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(output, expected)
    assert not torch.equal(output, llama.generate(ids, max_new_tokens=6, do_sample=False))


def test_saved_and_loaded(llama, tmp_path):
    model = adapted(llama, ["lm_head"])
    adapter_mapper(llama, model).save_pretrained(tmp_path)
    mapper = KVMapper.from_pretrained(tmp_path)
    assert FidelityGate().admit(mapper, llama, model).admitted
    assert FidelityGate().admit(mapper, SourceKV.prefill(llama, None, random_ids(llama, 2, 8)), model).admitted
    # What the source has read before the tokens that are left, it knows, and the target does not.
    [reason] = FidelityGate().admit(mapper, SourceKV.prefill(llama, None, random_ids(llama, 2, 8))[3:], model).reasons
    assert reason.startswith("the source has read more before")
    # It is no claim of the artifact's: it is looked at again with the models at hand.
    assert not FidelityGate().admit(mapper, None, None).admitted
    assert not FidelityGate().admit(mapper, llama, adapted(llama, ["k_proj"])).admitted
    assert not FidelityGate().admit(mapper, llama, tiny_model("llama", seed=5)).admitted


def test_what_is_not_exact_needs_evidence(llama):
    model = adapted(llama, MLP, layers_to_transform=[1, 2])
    mapper = adapter_mapper(llama, model)
    assert mapper.config.fit["exact_layers"] == [0, 1]
    assert [row[2] for row in layer_table(mapper).rows] == ["exact copy", "exact copy", "identity", "identity"]
    [reason] = FidelityGate().admit(mapper, llama, model).reasons
    assert reason.startswith("layers 0 to 1 are the same in both models, and of layers 2 to 3 it has no evidence")
    [reason] = FidelityGate().admit(mapper, llama, adapted(llama, ["v_proj"])).reasons
    assert reason.startswith("no layer is the same in both models")


# vllm#44250, vllm#30931, LMCache#2961
def test_adapters_are_switched_from_request_to_request(llama):
    """One model, one document read by it without adapters, each request with another adapter."""
    model = adapted(llama, ["q_proj", *MLP], "one", layers_to_transform=[3])
    model.add_adapter("two", peft.LoraConfig(target_modules=["o_proj", "lm_head"], r=4, layers_to_transform=[3]))
    model.add_adapter("third", peft.LoraConfig(target_modules=["k_proj"], r=4, layers_to_transform=[2]))
    randomized(model, "two", 1), randomized(model, "third", 2)
    ids = random_ids(llama, 1, CONTEXT + 4)
    with model.disable_adapter():
        source_kv = SourceKV.prefill(model, None, ids[:, :CONTEXT])
    answers = []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        cache = TranslatedCache(source_kv, adapter_mapper(source_kv, model), model, on_refusal="raise")
        answers.append(generate(model, {"input_ids": ids}, cache, max_new_tokens=6, do_sample=False))
        assert torch.equal(answers[-1], model.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
    mapper = adapter_mapper(source_kv, model)
    model.set_adapter("third")
    with pytest.raises(RefusedError, match="layers 0 to 1 are the same"):
        TranslatedCache(source_kv, mapper, model, on_refusal="raise")
    # From one adapter to another: what either of them changes is not exact.
    other_kv = SourceKV.prefill(model, None, ids[:, :CONTEXT])
    model.set_adapter("one")
    assert adapter_mapper(other_kv, model).config.fit["exact_layers"] == [0, 1]


@pytest.fixture
def switched(llama):
    """A model with four adapters. Of the keys and values only the last layer's depend on them, and not on all four."""
    model = adapted(llama, ["q_proj", *MLP], "late", layers_to_transform=[3])
    for seed, name in enumerate(("last", "other", "head"), 1):
        where = (
            {"target_modules": ["lm_head"]} if name == "head" else {"target_modules": ["layers.3.self_attn.v_proj"]}
        )
        model.add_adapter(name, peft.LoraConfig(r=4, **where))
        randomized(model, name, seed)
    return model


# vllm#44250, vllm#30931, LMCache#2961
def test_a_cache_that_another_adapter_has_filled_is_no_source(switched, llama):
    ids = random_ids(llama, 2, CONTEXT)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    switched.set_adapter("last")
    inner = switched.get_base_model()
    cache = inner(ids, attention_mask=mask, use_cache=True).past_key_values
    assert SourceKV.from_cache(cache, switched, ids, attention_mask=mask).identity.adapters.keys() == {"last"}
    switched.set_adapter("other")
    with pytest.raises(SourceCacheError, match="other adapters than adapter other .* values in layer 3"):
        SourceKV.from_cache(cache, switched, ids, attention_mask=mask)
    with switched.disable_adapter(), pytest.raises(SourceCacheError, match="other adapters than no adapter"):
        SourceKV.from_cache(cache, switched, ids, attention_mask=mask)
    # One that has no say in the keys and values of this model may have filled it.
    with switched.disable_adapter():
        cache = inner(ids, attention_mask=mask, use_cache=True).past_key_values
    for name in ("late", "head"):
        switched.set_adapter(name)
        assert len(SourceKV.from_cache(cache, switched, ids, attention_mask=mask)) == CONTEXT


def test_a_cache_that_another_adapter_has_filled_is_not_translated(switched, llama):
    ids = random_ids(llama, 1, CONTEXT + 4)
    switched.set_adapter("last")
    past = switched.get_base_model()(ids[:, :CONTEXT], use_cache=True).past_key_values
    mapper = adapter_mapper(switched, switched)
    arguments = {"source_model": switched, "source_input_ids": ids[:, :CONTEXT]}
    assert TranslatedCache(past, mapper, switched, **arguments).report.outcome == "translated"
    switched.set_adapter("other")
    cache = TranslatedCache(past, mapper, switched, **arguments)
    assert cache.report.outcome == "recomputed"
    [reason] = cache.report.reasons
    assert reason.startswith("SourceCacheError: The source cache was filled with other adapters than adapter other")
    output = generate(switched, {"input_ids": ids}, cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(output, switched.generate(input_ids=ids, max_new_tokens=6, do_sample=False))


def test_a_target_whose_adapter_is_switched_reads_the_context_itself(switched, llama):
    ids = random_ids(llama, 1, CONTEXT + 4)
    switched.set_adapter("last")
    source_kv = SourceKV.prefill(switched, None, ids[:, :CONTEXT])
    mapper = adapter_mapper(source_kv, switched)
    caches = [TranslatedCache(source_kv, mapper, switched, on_refusal=how) for how in ("recompute", "raise")]
    segments = [Segment(0, CONTEXT, source_kv, mapper)]
    caches.insert(1, TranslatedCache.from_segments(segments, switched, ids))
    assert all(cache.report.outcome == "translated" for cache in caches)
    switched.set_adapter("other")
    expected = switched.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    for cache in caches[:2]:
        output = generate(switched, {"input_ids": ids}, cache, max_new_tokens=6, do_sample=False)
        assert torch.equal(output, expected)
        assert cache.report.outcome == "recomputed"
        [reason] = cache.report.reasons
        assert "continues with adapter other, the cache was made for adapter last" in reason
    with pytest.raises(PairMismatchError, match="continues with adapter other"):
        generate(switched, {"input_ids": ids}, caches[2], max_new_tokens=6, do_sample=False)
    # Nothing was used: with the adapter that it was made for it serves still.
    switched.set_adapter("last")
    output = generate(switched, {"input_ids": ids}, caches[2], max_new_tokens=6, do_sample=False)
    assert torch.equal(output, switched.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert caches[2].report.translated_tokens > 0


def test_a_correction_of_what_is_not_exact(llama):
    model = adapted(llama, ["up_proj"], layers_to_transform=[1])
    texts = random_ids(llama, 40, 48, seed=2)
    mapper = adapter_mapper(llama, model, texts, rank=32, dtype=torch.float32)
    assert [spec["rank"] for spec in mapper.config.layers] == [0, 0, 32, 32]
    plain = adapter_mapper(llama, model)
    ids = random_ids(llama, 4, 48, seed=3)
    before, after = states(llama, ids), states(model, ids)
    for i in (2, 3):
        errors = [(m.layers[i]([before[i]]) - after[i]).square().mean() for m in (mapper, plain)]
        assert errors[0] < 0.9 * errors[1]
    for i in (0, 1):
        assert torch.equal(mapper.layers[i]([before[i]]), after[i])
    explained = [layer["explained_variance"] for layer in mapper.config.fit["layers"]]
    assert explained[:2] == [[1.0, 1.0]] * 2
    assert max(explained[2]) < 1


def test_what_is_refused(llama, gemma):
    with pytest.raises(PairMismatchError, match="not one model with other adapters"):
        adapter_mapper(llama, gemma)
    prompts = peft.get_peft_model(
        copy.deepcopy(llama), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        adapter_mapper(llama, prompts)
    assert exact_layers(ModelIdentity.from_model(llama), prompts).layers == ()
    model = adapted(llama, ["v_proj"])
    with pytest.raises(ValueError, match="no `texts`"):
        adapter_mapper(llama, model, max_length=64)
    with pytest.raises(ValueError, match="read by both models at once"):
        adapter_mapper(SourceKV.prefill(llama, None, random_ids(llama, 1, 8)), model, [[5] * 20])

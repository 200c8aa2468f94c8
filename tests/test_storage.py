"""The target's tokens in every kind of storage that transformers has, against its own cache of the same kind."""

import copy

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer, StaticSlidingWindowLayer

from hf_kvtransfer import FidelityGate, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument, read_into_cache
from hf_kvtransfer.layers import PendingLayer
from hf_kvtransfer.translation import Translation

from .tiny_models import fail_from_layer, identity_mapper, random_ids, tiny_model, ungated_cache


# Longer than the windows of the tiny Gemma.
LENGTH = 45
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")  # since transformers 5.22


class RoundingLayer(QuantizedLayer):
    """
    Transformers' own quantised layer around the simplest of quantisers, since its back ends are other packages. It has
    so many codes that it hardly shows where a difference of one ulp is rounded the other way.
    """

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax() / 2**20
        return (tensor / scale).round().to(torch.int32), scale

    def _dequantize(self, qtensor):
        codes, scale = qtensor
        return codes * scale


def static(model, max_cache_len=64):
    return StaticCache(config=model.config, max_cache_len=max_cache_len)


def rounding(model):
    return Cache(layers=[RoundingLayer(residual_length=6) for _ in range(model.config.num_hidden_layers)])


def fp8(model):
    return QuantizedCache("fp8", model.config)


needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="this transformers has no fp8 storage")
KINDS = [
    pytest.param("llama", static, id="llama-static"),
    pytest.param("gemma3", static, id="gemma3-static"),
    pytest.param("llama", rounding, id="llama-quantised"),
    pytest.param("llama", fp8, id="llama-fp8", marks=needs_fp8),
]


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(family) for family in ("llama", "gemma3")}


@pytest.fixture(scope="module")
def mappers(models):
    return {family: identity_mapper(model) for family, model in models.items()}


def stored(model, mapper, ids, storage, **options):
    return ungated_cache(SourceKV.prefill(model, None, ids), mapper, model, storage=storage, **options)


def native(model, ids, storage):
    """A cache of transformers itself that has read the same tokens."""
    read_into_cache(model, storage, ids[:, :-1])
    return storage


def run(model, ids, cache, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True} | options
    output = model.generate(ids, return_dict_in_generate=True, **options, **{cache_argument(model): cache})
    return torch.stack(output.logits), output.sequences


def assert_same(model, ids, cache, other, **options):
    logits, sequences = run(model, ids, cache, **options)
    expected, expected_sequences = run(model, ids, other, **options)
    assert torch.equal(sequences, expected_sequences)
    # Of 8 bits one that falls the other way does show.
    atol = {"RoundingLayer": 5e-5, "Fp8QuantizedLayer": 5e-2}.get(type(other.layers[0]).__name__, 1e-5)
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


@pytest.fixture
def calls(monkeypatch):
    """Layers and numbers of tokens asked of any translation, in order."""
    asked = []
    layer = Translation.layer

    def counted(self, layer_idx, start, stop, *args):
        asked.append((layer_idx, stop - start))
        return layer(self, layer_idx, start, stop, *args)

    monkeypatch.setattr(Translation, "layer", counted)
    return asked


@pytest.mark.parametrize(("family", "make"), KINDS)
@pytest.mark.parametrize("length", [33, LENGTH])  # as long as the windows, and longer
def test_decodes_as_the_native_cache(family, make, length, models, mappers, calls):
    model = models[family]
    ids = random_ids(model, 2, length)
    storage = make(model)
    cache, expected = stored(model, mappers[family], ids, storage), native(model, ids, make(model))
    assert calls == []
    for i in range(len(cache)):
        assert cache.get_seq_length(i) == int(expected.get_seq_length(i))
        assert cache.get_mask_sizes(3, i) == expected.get_mask_sizes(3, i)
        assert cache.get_max_length(i) == expected.get_max_length(i)
    assert cache.is_compileable == expected.is_compileable
    assert_same(model, ids, cache, expected)
    # Each layer once, and of a window no more than it holds.
    held = [min(length - 1, 32) if family == "gemma3" and i != 2 else length - 1 for i in range(4)]
    assert calls == list(enumerate(held))
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in expected.layers]
    assert storage.get_seq_length() == 0  # its layers were copied


@pytest.mark.parametrize(("family", "make"), KINDS)
def test_beams_edits_and_copies(family, make, models, mappers, calls):
    model = models[family]
    ids = random_ids(model, 2, LENGTH)
    cache = stored(model, mappers[family], ids, make(model))
    twin = copy.deepcopy(cache)
    # What is not translated yet can be edited, whatever the storage can do once it is filled.
    twin.crop(-5)
    twin.batch_select_indices(torch.tensor([1, 0]))
    assert calls == []
    assert_same(model, ids[[1, 0]], twin, native(model, ids[[1, 0], : LENGTH - 5], make(model)))
    if make is rounding and not hasattr(QuantizedLayer, "_apply_pending_reorder"):
        with pytest.raises(RuntimeError, match="`reorder_cache` is not possible"):
            run(model, ids, cache, num_beams=3)
        return
    expected = native(model, ids.repeat_interleave(3, 0), make(model))
    assert_same(model, ids, cache, expected, num_beams=3)


def test_a_second_turn_and_a_crop_in_static_storage(models, mappers):
    model = models["llama"]
    ids = random_ids(model, 1, 30)
    cache, expected = (f(model) for f in (lambda m: stored(m, mappers["llama"], ids, static(m)), static))
    native(model, ids, expected)
    _, sequences = run(model, ids, cache)
    run(model, ids, expected)
    prompt = torch.cat([sequences, random_ids(model, 1, 5, seed=9)], 1)
    assert_same(model, prompt, cache, expected)
    if hasattr(StaticLayer, "crop"):
        cache.crop(-20)
        expected.crop(-20)
        assert_same(model, prompt[:, :40], cache, expected)


def test_what_a_filled_storage_cannot_do_is_refused(models, mappers):
    model, ids = models["llama"], random_ids(models["llama"], 1, 30)
    cache = stored(model, mappers["llama"], ids, rounding(model))
    run(model, ids, cache)
    for edit in (
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(
            RuntimeError, match=r"not possible once the target has used a cache of RoundingLayers.*Do it"
        ):
            edit()
    cache = stored(model, mappers["llama"], ids, static(model))
    run(model, ids, cache)
    with pytest.raises(RuntimeError, match=r"`batch_select_indices` is not possible.*StaticLayers"):
        cache.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize(("family", "make"), KINDS)
def test_a_failing_layer_leaves_a_cache_that_can_be_asked_again(family, make, models, mappers, monkeypatch):
    model = models[family]
    ids = random_ids(model, 1, LENGTH)
    cache = stored(model, mappers[family], ids, make(model))
    assert cache.layers[1].keys is not None  # translated already, and about to be written into
    with monkeypatch.context() as patch:
        fail_from_layer(patch, 2)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(model, ids, cache)
    assert [int(cache.get_seq_length(i)) for i in range(4)] == [LENGTH - 1] * 4
    assert_same(model, ids, cache, native(model, ids, make(model)))


@pytest.mark.parametrize(("family", "make"), KINDS[:3])
def test_a_translation_that_fails_is_read_by_the_target_into_the_same_storage(
    family, make, models, mappers, monkeypatch
):
    model = models[family]
    ids = random_ids(model, 1, LENGTH)
    cache = TranslatedCache(
        SourceKV.prefill(model, None, ids),
        mappers[family],
        model,
        gate=FidelityGate(strict=False),
        storage=make(model),
    )
    fail_from_layer(monkeypatch, 0)
    assert_same(model, ids, cache, native(model, ids, make(model)))
    assert cache.report.outcome == "recomputed"


def test_a_refused_cache_is_an_empty_storage(models, mappers):
    model, ids = models["gemma3"], random_ids(models["gemma3"], 1, LENGTH)
    cache = TranslatedCache(SourceKV.prefill(model, None, ids), mappers["gemma3"], model, storage=static(model))
    assert cache.report.outcome == "recomputed"
    assert {type(layer) for layer in cache.layers} == {StaticLayer, StaticSlidingWindowLayer}
    assert_same(model, ids, cache, static(model))


def test_wrong_storages_are_refused(models, mappers):
    model, ids = models["llama"], random_ids(models["llama"], 1, 20)
    filled = native(model, ids, static(model))
    for storage, message in (
        ("static", "must be an empty cache such as .*, got str"),
        (DynamicCache(), "has 0 layers.*the target has 4 and 4. Make it with the config"),
        (StaticCache(config=tiny_model("llama", num_hidden_layers=2).config, max_cache_len=64), "has 2 layers"),
        (filled, "holds tokens already"),
        (static(model, 19), "has room for 19 tokens, the translation stands for 19"),
    ):
        with pytest.raises(ValueError, match=message):
            stored(model, mappers["llama"], ids, storage)
    stored(model, mappers["llama"], ids, static(model, 20))
    gemma = models["gemma3"]
    with pytest.raises(ValueError, match="has room for 19 tokens"):
        stored(gemma, mappers["gemma3"], random_ids(gemma, 1, 20), static(gemma, 19))


@pytest.mark.parametrize(("backend", "module"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_a_back_end_that_is_not_installed(backend, module, models):
    """Transformers says so when the storage is made, before anything is translated."""
    try:
        __import__(module)
    except ImportError:
        with pytest.raises(ImportError, match="You need to install"):
            QuantizedCache(backend, models["llama"].config)
    else:
        pytest.skip(f"{module} is installed")


def test_offloaded_storage(models, mappers, monkeypatch):
    """Offloading needs an accelerator; streams that do nothing stand in for its own."""

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return None

        def wait_stream(self, other):
            pass

    offloaded = []
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    model, ids = models["gemma3"], random_ids(models["gemma3"], 1, LENGTH)
    cache, expected = (DynamicCache(config=model.config, offloading=True) for _ in range(2))
    cache = stored(model, mappers["gemma3"], ids, cache)
    monkeypatch.setattr(cache, "offload", lambda layer_idx, only: offloaded.append(layer_idx))
    twin = copy.deepcopy(cache)
    assert all(isinstance(layer, PendingLayer) for layer in twin.layers)
    assert_same(model, ids, cache, native(model, ids, expected))
    assert offloaded[:4] == [0, 1, 2, 3]


def test_compiled_decode(models, mappers):
    """One graph serves the decode of a translated static cache, as it does that of a native one."""
    model, ids = models["llama"], random_ids(models["llama"], 1, 30)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def decode(cache, step):
        logits, token = [], ids[:, -1:]
        with torch.no_grad():
            for position in range(29, 34):
                output = step(
                    input_ids=token, position_ids=torch.tensor([[position]]), **{cache_argument(model): cache}
                )
                logits.append(output.logits)
                token = output.logits[:, -1:].argmax(-1)
        return torch.cat(logits)

    cache = stored(model, mappers["llama"], ids, static(model))
    assert cache.is_compileable
    expected = decode(native(model, ids, static(model)), model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    read = iter([model])  # as `generate` does, the first forward pass runs as it is
    actual = decode(cache, lambda **inputs: next(read, compiled)(**inputs))
    torch._dynamo.reset()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert len(graphs) == 1

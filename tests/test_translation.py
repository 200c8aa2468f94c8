"""What a translation computes, against the same written out; and which pairs it refuses."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from hf_kvtransfer import (
    AlignmentError,
    FidelityGate,
    KVGeometry,
    KVMapper,
    KVMapperConfig,
    PairMismatchError,
    SourceKV,
    TokenizerMismatchError,
    TranslatedCache,
)
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.fidelity.tail_reading import read_tail
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint
from hf_kvtransfer.native_states import read_first_layers
from hf_kvtransfer.rotary import Rotary
from hf_kvtransfer.translation import Translation

from .tiny_models import fail_from_layer, identity_mapper, random_ids, tiny_model, ungated_cache, with_native_layers


TEXTS = [
    "The harbour lies where the river meets the sea, and forty boats work from it. 日本語 🎉 " * 3,
    "What does the delta give the farmers?\n\nIt gives them silt, water and fish.",
]


@pytest.fixture(scope="module")
def pair():
    return tiny_model("llama"), tiny_model("gemma3", seed=1)


@pytest.fixture(scope="module")
def mapper(pair, tokenizers):
    """A random mapper from Llama's 2 heads of 16 to Gemma's 2 of 24, with token features."""
    return random_mapper(pair, tokenizers, native_layers=None)


def random_mapper(pair, tokenizers, native_layers, previous_tokens=(0, 0, 0, 0)):
    """As `mapper`, whose first layers are left to the target, up to `native_layers`; others may read tokens before."""
    source, target = pair
    sides = [
        {"name": name, "geometry": KVGeometry.from_model(m).to_dict(), "tokenizer": tokenizer_fingerprint(tokenizer)}
        for name, m, tokenizer in (("a", source, tokenizers["bpe"]), ("b", target, tokenizers["unigram"]))
    ]
    layers = [{"kind": "linear", "source_layers": chosen} for chosen in ([0], [3, 1], [1, 2, 3], [2])]
    for spec, number in zip(layers, previous_tokens, strict=True):
        spec |= {"previous_tokens": number} if number else {}
    if native_layers is not None:
        layers[: native_layers + 1] = [{"kind": "native"}] * (native_layers + 1)
    config = KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=64, sink_tokens=3)
    mapper = KVMapper(config).eval()
    torch.manual_seed(2)
    for parameter in mapper.parameters():
        parameter.data.normal_(std=0.2)
    return mapper


@torch.no_grad()
def written_out(source_kv, mapper, target, row, target_ids, index, layer_idx, token_features=None):
    """Keys and values of one row and layer, all features concatenated, one token stream without padding."""
    if token_features is None:
        token_features = target.get_input_embeddings()(target_ids)
    spec = mapper.config.layers[layer_idx]
    real = source_kv.attention_mask[row].bool()
    features = [source_kv.features[i][row, real][index] for i in spec["source_layers"]]
    places = torch.arange(len(index))
    before = [(places - distance).clamp(min=0) for distance in range(1 + spec.get("previous_tokens", 0))]
    x = torch.cat([*features, *(token_features[place] for place in before)], dim=-1)
    layer_map = mapper.layers[layer_idx]
    y = x @ layer_map.weight.T + layer_map.bias
    keys, values = (half.view(len(index), 2, 24).transpose(0, 1)[None] for half in y.split(48, dim=-1))
    positions = torch.arange(len(index))[None]
    return Rotary.from_model(target).at(positions).apply(keys, layer_idx), values


def spoken_for(source_spans, spans):
    """Which source token speaks for each target token."""
    return torch.tensor(
        [max((i for i, (start, _) in enumerate(source_spans) if start < end), default=0) for _, end in spans]
    )


# LMCache#2442
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_map_written_out(pair, mapper, tokenizers, batch):
    source, target = pair
    texts = TEXTS[:batch]
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], texts)
    cache = ungated_cache(source_kv, mapper, target, target_tokenizer=tokenizers["unigram"])
    assert cache.report.native_tokens == 3 * batch
    assert cache.report.held_back_tokens == batch
    assert cache.report.translated_tokens == int(cache.attention_mask.sum()) - 3 * batch
    for row, text in enumerate(texts):
        encoding = tokenizers["unigram"](text, return_offsets_mapping=True)
        ids, spans = torch.tensor(encoding["input_ids"])[:-1], encoding["offset_mapping"][:-1]
        assert torch.equal(cache.input_ids[row, cache.attention_mask[row].bool()], ids)
        index = spoken_for(source_kv.row_spans(row), spans)
        for layer_idx, layer in enumerate(cache.layers):
            keys, values = written_out(source_kv, mapper, target, row, ids, index, layer_idx)
            held = min(layer.keys.shape[2], len(ids) - 3)  # a window may not reach back to the sinks
            for states, expected in ((layer.keys, keys), (layer.values, values)):
                torch.testing.assert_close(states[row, :, -held:], expected[0, :, -held:], rtol=1e-4, atol=1e-5)


# PrefixQuant#3
def test_the_target_reads_the_first_tokens_itself(pair, mapper, tokenizers):
    source, target = pair
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], TEXTS)
    cache = ungated_cache(source_kv, mapper, target, target_tokenizer=tokenizers["unigram"], sink_tokens=5)
    full = 2  # the layer without a window
    for row in range(2):
        ids = cache.input_ids[row, cache.attention_mask[row].bool()]
        native = SourceKV.prefill(target, None, ids[:5])
        first = len(cache.input_ids[row]) - len(ids)
        keys = cache.layers[full].keys[row : row + 1, :, first : first + 5]
        native_keys = Rotary.from_model(target).at(torch.arange(5)[None]).apply(native.key_states(full), full)
        torch.testing.assert_close(keys, native_keys, rtol=1e-4, atol=1e-5)


# guoqingbao/xinfer#277
def test_a_prompt_that_goes_on_or_is_templated(pair, mapper, tokenizers):
    source, target = pair
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], "<user>" + TEXTS[1] + "<end>")
    tokenizer = tokenizers["unigram"]
    context = "[INST] " + TEXTS[1]
    prompt = tokenizer(context + " [/INST] And what do the boats bring?", return_tensors="pt")
    cache = ungated_cache(source_kv, mapper, target, target_tokenizer=tokenizer, input_ids=prompt.input_ids)
    covered = tokenizer.decode(cache.input_ids[0])
    assert TEXTS[1][:-3] in covered
    assert "boats" not in covered
    assert 0.5 < cache.report.coverage < 1
    assert target.generate(**cache.prepare(prompt), max_new_tokens=3).shape[1] == prompt.input_ids.shape[1] + 3


def test_texts_without_anything_in_common_are_refused(pair, mapper, tokenizers):
    source, target = pair
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], "Zwölf Boxkämpfer jagen Viktor.")
    with pytest.raises(AlignmentError, match="no text in common"):
        ungated_cache(
            source_kv,
            mapper,
            target,
            target_tokenizer=tokenizers["unigram"],
            input_ids=tokenizers["unigram"](TEXTS[1], return_tensors="pt").input_ids,
        )
    mostly_template = tokenizers["unigram"]("What does the delta " + "x y z " * 40 + "give the farmers?")
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], "What does the delta give the farmers?")
    with pytest.raises(AlignmentError, match="of the target's tokens are text that the source has read"):
        ungated_cache(
            source_kv,
            mapper,
            target,
            target_tokenizer=tokenizers["unigram"],
            input_ids=torch.tensor([mostly_template.input_ids]),
        )


def test_other_tokenizers_are_refused(pair, mapper, tokenizers):
    source, target = pair
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], TEXTS[0])
    with pytest.raises(TokenizerMismatchError, match=r"pass the target's tokenizer \(target_tokenizer=\)"):
        ungated_cache(source_kv, mapper, target)
    with pytest.raises(TokenizerMismatchError, match="The target's tokenizer .* is not the one that mapper"):
        ungated_cache(source_kv, mapper, target, target_tokenizer=tokenizers["wordpiece"])
    with pytest.raises(TokenizerMismatchError, match="The source's tokenizer"):
        other = SourceKV.prefill(source, tokenizers["wordpiece"], TEXTS[0])
        ungated_cache(other, mapper, target, target_tokenizer=tokenizers["unigram"])
    with pytest.raises(TokenizerMismatchError, match="pass the source's tokenizer"):
        bare = SourceKV.prefill(source, None, random_ids(source, 1, 20))
        ungated_cache(bare, mapper, target, target_tokenizer=tokenizers["unigram"])


def test_a_cache_can_be_the_source_when_its_tokenizer_is_given(pair, mapper, tokenizers):
    from transformers import DynamicCache

    from hf_kvtransfer.compat import read_into_cache

    source, target = pair
    ids = tokenizers["bpe"](TEXTS[0], return_tensors="pt").input_ids
    plain = DynamicCache()
    read_into_cache(source, plain, ids)
    options = {"target_tokenizer": tokenizers["unigram"]}
    cache = ungated_cache(
        plain,
        mapper,
        target,
        source_model=source,
        source_input_ids=ids,
        source_tokenizer=tokenizers["bpe"],
        **options,
    )
    expected = ungated_cache(SourceKV.prefill(source, tokenizers["bpe"], TEXTS[0]), mapper, target, **options)
    torch.testing.assert_close(cache.layers[1].keys, expected.layers[1].keys)


def test_negative_counts_are_refused(pair):
    llama = pair[0]
    source_kv = SourceKV.prefill(llama, None, random_ids(llama, 1, 9))
    with pytest.raises(ValueError, match="`tail_tokens` must be 0 or more, got -1"):
        ungated_cache(source_kv, identity_mapper(llama), llama, tail_tokens=-1)


def test_hidden_sizes_are_checked(pair):
    llama = pair[0]
    mapper = identity_mapper(llama)
    mapper.config.token_features = 32
    with pytest.raises(PairMismatchError, match="token embeddings of width 32, those of the target .* are 64 wide"):
        ungated_cache(SourceKV.prefill(llama, None, random_ids(llama, 1, 9)), mapper, llama)


def test_hidden_sizes_of_native_layers_are_checked_before_a_layer_is_used():
    model = tiny_model("llama")
    ids = random_ids(model, 1, 30)
    mapper = with_native_layers(identity_mapper(model), 1, token_features=32)
    source_kv = SourceKV.prefill(model, None, ids)
    cache = TranslatedCache(source_kv, mapper, model, gate=FidelityGate(strict=False))
    native = model.generate(ids, max_new_tokens=5, do_sample=False)
    output = model.generate(ids, max_new_tokens=5, do_sample=False, **{cache_argument(model): cache})
    assert torch.equal(output, native)
    assert "reads hidden states of layer 1 of width 32, those of the target" in str(cache.report)
    translation = Translation(source_kv, mapper, model)
    with pytest.raises(PairMismatchError, match="of width 32, those of the target .* are 64 wide"):
        translation.layer(3, 0, 9, torch.device("cpu"), torch.float32)


def test_hidden_states_may_be_wider_than_embeddings():
    """OPT-350m projects its embeddings, of 512 numbers, to hidden states of 1024."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=100,
        hidden_size=64,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
    )
    model = OPTForCausalLM(config).eval()
    ids = random_ids(model, 1, 30)
    translation = Translation(SourceKV.prefill(model, None, ids), native_identity(model, 1), model)
    native = translation.prefill()
    for i in range(3):
        states = translation.layer(i, 0, translation.length, torch.device("cpu"), torch.float32)
        torch.testing.assert_close(states[1], native.layers[i].values, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def attention_input(target, input_ids, layer_idx):
    """What a layer's attention is called with when the target reads all of a row."""
    heard = []
    hook = target.model.layers[layer_idx].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: heard.append(kwargs["hidden_states"]), with_kwargs=True
    )
    target(input_ids)
    hook.remove()
    return heard[0]


def native_identity(model, native_layers):
    """The exact mapper of a model to itself, with a share of the layers left to the target."""
    return with_native_layers(identity_mapper(model), native_layers)


@pytest.fixture
def readings(monkeypatch):
    """The numbers of layers that translations have let the target run, one for each time."""
    runs = []

    def counted(*args, num_layers, **kwargs):
        runs.append(num_layers)
        return read_first_layers(*args, num_layers=num_layers, **kwargs)

    monkeypatch.setattr("hf_kvtransfer.target_tokens.read_first_layers", counted)
    return runs


@pytest.mark.parametrize("native_layers", [0, 2])
def test_native_layers_are_exact_and_the_others_read_their_hidden_states(pair, tokenizers, native_layers):
    source, target = pair
    mapper = random_mapper(pair, tokenizers, native_layers)
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], TEXTS)
    translation = Translation(source_kv, mapper, target, target_tokenizer=tokenizers["unigram"], sink_tokens=3)
    native = translation.prefill()
    placement = torch.device("cpu"), torch.float32
    for row, text in enumerate(TEXTS):
        real = translation.attention_mask[row].bool()
        encoding = tokenizers["unigram"](text, return_offsets_mapping=True)
        ids, index = translation.input_ids[row, real], spoken_for(source_kv.row_spans(row), encoding["offset_mapping"])
        hidden_states = attention_input(target, ids[None], native_layers)[0]
        for layer_idx in range(4):
            states = translation.layer(layer_idx, 0, translation.length, *placement)
            if layer_idx <= native_layers:
                first, expected = 0, [native.layers[layer_idx].keys, native.layers[layer_idx].values]
                expected = [other[row : row + 1, :, real] for other in expected]
            else:
                first = 3  # sinks
                expected = written_out(
                    source_kv, mapper, target, row, ids, index[: len(ids)], layer_idx, hidden_states
                )
            for own, other in zip(states, expected, strict=True):
                torch.testing.assert_close(own[row, :, real][:, first:], other[0, :, first:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("native_layers", [None, 0, 1])
def test_tokens_before_are_read_in_each_row(pair, tokenizers, native_layers):
    """Up to a row's first token, not into its padding, and across the borders of ranges that are asked for."""
    source, target = pair
    mapper = random_mapper(pair, tokenizers, native_layers, previous_tokens=(0, 2, 0, 3))
    assert mapper.config.previous_tokens == 3
    source_kv = SourceKV.prefill(source, tokenizers["bpe"], TEXTS)
    translation = Translation(source_kv, mapper, target, target_tokenizer=tokenizers["unigram"], sink_tokens=1)
    placement = torch.device("cpu"), torch.float32
    whole = [translation.layer(i, 0, translation.length, *placement) for i in range(4)]
    for row, text in enumerate(TEXTS):
        real = translation.attention_mask[row].bool()
        encoding = tokenizers["unigram"](text, return_offsets_mapping=True)
        ids, index = translation.input_ids[row, real], spoken_for(source_kv.row_spans(row), encoding["offset_mapping"])
        features = None if native_layers is None else attention_input(target, ids[None], native_layers)[0]
        for layer_idx in range(2, 4):
            expected = written_out(source_kv, mapper, target, row, ids, index[: len(ids)], layer_idx, features)
            for own, other in zip(whole[layer_idx], expected, strict=True):
                torch.testing.assert_close(own[row, :, real][:, 1:], other[0, :, 1:], rtol=1e-4, atol=1e-4)
    for start, stop in ((0, 7), (7, 8), (8, translation.length)):
        for layer_idx in range(4):
            for own, other in zip(
                translation.layer(layer_idx, start, stop, *placement), whole[layer_idx], strict=True
            ):
                torch.testing.assert_close(own, other[:, :, start:stop], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("native_layers", [0, 1, 3])
def test_generating_with_native_layers(family, native_layers, readings):
    model = tiny_model(family)
    prompts = random_ids(model, 2, 60)
    mask = torch.ones_like(prompts)
    mask[1, :25] = 0
    inputs = {"input_ids": prompts * mask, "attention_mask": mask}
    source_kv = SourceKV.prefill(model, None, inputs["input_ids"][:, :50], attention_mask=mask[:, :50])
    cache = ungated_cache(source_kv, native_identity(model, native_layers), model, **inputs)
    assert cache.report.native_layers == native_layers
    assert f"; layers 0 to {native_layers} are the target's own" in str(cache.report)
    assert not readings
    native = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    output = model.generate(**cache.prepare(inputs), max_new_tokens=8, do_sample=False)
    assert torch.equal(output, native)
    assert cache.report.outcome == "translated"
    assert readings == [native_layers]
    assert sorted(cache.report.layer_seconds) == [0, 1, 2, 3]


def test_ranges_of_native_layers_are_copies():
    model = tiny_model("gemma3")
    ids = random_ids(model, 1, 50)
    translation = Translation(SourceKV.prefill(model, None, ids), native_identity(model, 1), model)
    native = translation.prefill().layers[1]
    placement = torch.device("cpu"), torch.float32
    keys, values = translation.layer(1, 5, 40, *placement)
    torch.testing.assert_close(keys, native.keys[:, :, 5:40])
    torch.testing.assert_close(values, native.values[:, :, 5:40])
    keys.zero_()
    assert translation.layer(1, 5, 40, *placement)[0].count_nonzero()
    assert translation.layer(1, 7, 7, *placement)[0].shape == (1, 2, 0, 24)
    assert translation.layer(0, 7, 9, torch.device("cpu"), torch.bfloat16)[0].dtype == torch.bfloat16


def test_another_mapper_shares_what_is_the_targets(readings):
    model = tiny_model("llama")
    translation = Translation(
        SourceKV.prefill(model, None, random_ids(model, 1, 30)), native_identity(model, 1), model
    )
    placement = torch.device("cpu"), torch.float32
    expected = translation.layer(3, 0, translation.length, *placement)[0]
    same, other = (translation.with_mapper(native_identity(model, native_layers)) for native_layers in (1, 2))
    without = translation.with_mapper(identity_mapper(model))
    for another in (same, other, without):
        assert not another.layer_seconds
        torch.testing.assert_close(another.layer(3, 0, translation.length, *placement)[0], expected)
        torch.testing.assert_close(another.layer(1, 0, 20, *placement), translation.layer(1, 0, 20, *placement))
    assert readings == [1, 2]
    assert sorted(translation.layer_seconds) == [1, 3]


def test_the_tail_is_read_on_top_of_native_layers(readings):
    model = tiny_model("gemma3")
    translation = Translation(
        SourceKV.prefill(model, None, random_ids(model, 2, 70)), native_identity(model, 1), model
    )
    (reading, _), cache = read_tail(translation, 16)
    native = translation.prefill()
    for layer, own in zip(cache.layers, native.layers, strict=True):
        held = layer.keys.shape[2]
        torch.testing.assert_close(layer.keys, own.keys[:, :, -held:], rtol=1e-4, atol=1e-4)
    assert max(error for row in reading.state_errors for error in row) < -15
    assert readings == [1]


def test_a_map_that_fails_behind_native_layers_is_recomputed(monkeypatch):
    model = tiny_model("llama")
    ids = random_ids(model, 1, 30)
    cache = TranslatedCache(
        SourceKV.prefill(model, None, ids), native_identity(model, 1), model, gate=FidelityGate(strict=False)
    )
    native = model.generate(ids, max_new_tokens=5, do_sample=False)
    fail_from_layer(monkeypatch, 2)
    output = model.generate(ids, max_new_tokens=5, do_sample=False, **{cache_argument(model): cache})
    assert torch.equal(output, native)
    assert cache.report.outcome == "recomputed"


def test_native_layers_that_fail_are_recomputed(monkeypatch):
    model = tiny_model("llama")
    ids = random_ids(model, 1, 30)
    cache = TranslatedCache(
        SourceKV.prefill(model, None, ids), native_identity(model, 1), model, gate=FidelityGate(strict=False)
    )

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hf_kvtransfer.target_tokens.read_first_layers", fail)
    native = model.generate(ids, max_new_tokens=5, do_sample=False)
    output = model.generate(ids, max_new_tokens=5, do_sample=False, **{cache_argument(model): cache})
    assert torch.equal(output, native)
    assert cache.report.outcome == "recomputed"
    assert "out of memory" in str(cache.report)

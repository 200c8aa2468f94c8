"""What a translation computes, against the same written out; and which pairs it refuses."""

import pytest
import torch

from hf_kvtransfer import (
    AlignmentError,
    KVGeometry,
    KVMapper,
    KVMapperConfig,
    PairMismatchError,
    SourceKV,
    TokenizerMismatchError,
)
from hf_kvtransfer.rotary import Rotary
from hf_kvtransfer.tokenizer_identity import tokenizer_fingerprint

from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache


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
    source, target = pair
    sides = [
        {"name": name, "geometry": KVGeometry.from_model(m).to_dict(), "tokenizer": tokenizer_fingerprint(tokenizer)}
        for name, m, tokenizer in (("a", source, tokenizers["bpe"]), ("b", target, tokenizers["unigram"]))
    ]
    layers = [{"kind": "linear", "source_layers": chosen} for chosen in ([0], [3, 1], [1, 2, 3], [2])]
    config = KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=64, sink_tokens=3)
    mapper = KVMapper(config).eval()
    torch.manual_seed(2)
    for parameter in mapper.parameters():
        parameter.data.normal_(std=0.2)
    return mapper


@torch.no_grad()
def written_out(source_kv, mapper, target, row, target_ids, index, layer_idx):
    """Keys and values of one row and layer, all features concatenated, one token stream without padding."""
    spec = mapper.config.layers[layer_idx]
    real = source_kv.attention_mask[row].bool()
    features = [source_kv.features[i][row, real][index] for i in spec["source_layers"]]
    x = torch.cat([*features, target.get_input_embeddings()(target_ids)], dim=-1)
    layer_map = mapper.layers[layer_idx]
    y = x @ layer_map.weight.T + layer_map.bias
    keys, values = (half.view(len(index), 2, 24).transpose(0, 1)[None] for half in y.split(48, dim=-1))
    positions = torch.arange(len(index))[None]
    return Rotary.from_model(target).at(positions).apply(keys, layer_idx), values


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
        source_spans = source_kv.row_spans(row)
        index = torch.tensor(
            [max((i for i, (start, _) in enumerate(source_spans) if start < end), default=0) for _, end in spans]
        )
        for layer_idx, layer in enumerate(cache.layers):
            keys, values = written_out(source_kv, mapper, target, row, ids, index, layer_idx)
            held = min(layer.keys.shape[2], len(ids) - 3)  # a window may not reach back to the sinks
            for states, expected in ((layer.keys, keys), (layer.values, values)):
                torch.testing.assert_close(states[row, :, -held:], expected[0, :, -held:], rtol=1e-4, atol=1e-5)


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

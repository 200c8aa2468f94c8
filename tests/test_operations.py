"""How much work a translation is: counted, since the count is the same on every machine."""

import pytest
import torch
from torch.nn.functional import linear
from transformers import DynamicCache

import hf_kvtransfer.maps.linear
import hf_kvtransfer.target_tokens
from benchmarks.operations import Operations
from hf_kvtransfer import SourceKV
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.few_rows import FewRows
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint
from hf_kvtransfer.rotary import Rotary
from hf_kvtransfer.translation import Translation

from .tiny_models import READ, random_ids, random_mapper, tiny_model, ungated_cache, with_native_layers


LENGTH = 300
CPU = torch.device("cpu")
SOURCE_WIDTH, TARGET_WIDTH, HIDDEN = 80, 96, 64  # all of them differ, so that a shape says what it is of


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama", head_dim=20)
    return source, tiny_model("gemma3", seed=1, sliding_window=128)


def translated(pair, mapper, rows=1):
    ids = random_ids(pair[0], rows, LENGTH) % 50 + 3  # as in a text, they repeat
    return Translation(SourceKV.prefill(pair[0], None, ids), mapper, pair[1])


def counted(translation, layer_idx, start=0):
    with Operations() as operations:
        translation.layer(layer_idx, start, translation.length, CPU, torch.float32)
    return operations


def rows_of(operations, width):
    """Rows of the left factor of each product with features of this width."""
    factors = [product.factors for product in operations.products]
    return [first[:-1].numel() for first, second in factors if second[-2:] == (width, TARGET_WIDTH)]


def block_size():
    """The widest layer is that without a window. What is made of a block is no larger."""
    return (LENGTH - 1) // 2


def test_operations_are_counted():
    first, second, third = torch.ones(3, 4), torch.ones(4, 5), torch.ones(2, 3, 5)
    with Operations() as operations:
        (first @ second).clone()
        torch.baddbmm(third, first.expand(2, 3, 4), second.expand(2, 4, 5))
    assert [product.flops for product in operations.products] == [120, 240]
    assert operations.products[0].factors == ((3, 4), (4, 5))
    assert operations.moves == [("clone", (3, 5))]
    assert operations.flops == 360 and operations.product_seconds > 0


@pytest.mark.parametrize("layer_idx", range(4))
def test_products_of_a_layer(pair, layer_idx):
    """One of each source layer and one of the tokens a block, of no more rows than there are to be mapped."""
    mapper = random_mapper(*pair, token_features=HIDDEN)
    translation = translated(pair, mapper)
    operations = counted(translation, layer_idx)
    mapped = translation.length - translation.num_sinks
    blocks = rows_of(operations, HIDDEN)
    assert len(blocks) == -(-mapped // block_size())
    assert len(operations.products) == len(blocks) * (len(READ[layer_idx]) + 1)
    assert sum(rows_of(operations, SOURCE_WIDTH)) == mapped * len(READ[layer_idx])
    assert operations.flops == 2 * TARGET_WIDTH * (mapped * len(READ[layer_idx]) * SOURCE_WIDTH + sum(blocks) * HIDDEN)


def test_a_window_is_mapped_in_one_block(pair):
    """Where the cache has a layer without one, the size of which says how large a block may be."""
    translation = translated(pair, random_mapper(*pair))
    operations = counted(translation, 0, start=translation.length - 127)
    assert rows_of(operations, SOURCE_WIDTH) == [127]


@pytest.mark.parametrize("native_layers", [None, 0, 1])
def test_equal_tokens_are_multiplied_once(pair, native_layers, monkeypatch):
    """What is read of the target depends on the id alone: embeddings, and what comes before the first attention."""
    if native_layers is None:
        mapper = random_mapper(*pair, token_features=HIDDEN)
    else:
        mapper = with_native_layers(random_mapper(*pair), native_layers, HIDDEN)
        torch.nn.init.normal_(mapper.layers[2].weight)
    translation = translated(pair, mapper)
    start, stop = translation.num_sinks, translation.length
    translation.layer(2, start, stop, CPU, torch.float32)  # native layers run at the first call
    operations = counted(translation, 2, start)
    ids = translation.input_ids[0, start:]
    halves = ids.split(-(-len(ids) // 2))  # as many blocks as it takes, and no shorter than the others
    assert len(halves[0]) <= block_size()
    blocks = [len(half.unique()) if native_layers != 1 else len(half) for half in halves]
    assert rows_of(operations, HIDDEN) == blocks[::-1]  # the block that is held comes first
    states = translation.layer(2, start, stop, CPU, torch.float32)
    for module in (hf_kvtransfer.target_tokens, hf_kvtransfer.maps.linear):
        monkeypatch.setattr(module, "MAX_DISTINCT", 0)
    for own, other in zip(states, translated(pair, mapper).layer(2, start, stop, CPU, torch.float32), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)


def test_layers_that_ask_for_the_same_tokens_share_what_depends_on_them(pair):
    """The distinct tokens, their states, and cos and sin are there for the second layer with the same window."""
    translation = translated(pair, random_mapper(*pair, token_features=HIDDEN))
    start = translation.length - 127
    first, second = (counted(translation, layer_idx, start) for layer_idx in (0, 1))
    assert [first.calls[name] for name in ("_unique2", "embedding")] == [1, 1]
    assert not any(second.calls[name] for name in ("_unique2", "cos", "embedding"))


def test_the_first_layer_reads_distinct_tokens_once(pair):
    """A few twice: that it is the same is seen and not believed."""
    mapper = with_native_layers(random_mapper(*pair), 0, HIDDEN)
    translation = translated(pair, mapper)
    with Operations() as operations:
        translation.layer(0, 0, translation.length, CPU, torch.float32)
    factors = [product.factors for product in operations.products]
    assert {first[:-1].numel() for first, _ in factors} == {len(translation.input_ids.unique()) + 8}
    assert {second[-1] for _, second in factors} == set(translation.geometry.layers[0].widths)  # and no queries


def test_ids_that_hardly_repeat_are_not_looked_up(pair):
    translation = translated(pair, random_mapper(*pair, token_features=HIDDEN))
    translation._target_tokens.input_ids = torch.arange(3, LENGTH + 2)[None]
    assert sum(rows_of(counted(translation, 2), HIDDEN)) == translation.length - translation.num_sinks


@pytest.mark.parametrize("rows", [1, 2])
def test_no_source_features_are_copied(pair, rows):
    """Neither of the whole context nor of the range that a window sees, in a batch neither."""
    translation = translated(pair, random_mapper(*pair, token_features=HIDDEN), rows)
    for layer_idx, start in ((0, translation.length - 127), (2, 0)):
        operations = counted(translation, layer_idx, start)
        assert operations.products
        assert not [move for move in operations.moves if move[1][-1] == SOURCE_WIDTH]


def test_gathered_is_what_the_map_gives(pair, tokenizers):
    """Between tokenizers nothing is moved from token to token but the outputs: features are three times as wide."""
    fingerprints = tokenizer_fingerprint(tokenizers["bpe"]), tokenizer_fingerprint(tokenizers["unigram"])
    mapper = random_mapper(*pair, fingerprints)
    text = "The harbour lies where the river meets the sea, and forty boats work from it. " * 5
    source_kv = SourceKV.prefill(pair[0], tokenizers["bpe"], text)
    translation = Translation(source_kv, mapper, pair[1], target_tokenizer=tokenizers["unigram"])
    operations = counted(translation, 2)
    assert not [move for move in operations.moves if move[1][-1] == SOURCE_WIDTH]
    gathered = [shape for name, shape in operations.moves if name in ("index", "index_select", "gather")]
    assert sum(shape[0] for shape in gathered if shape[-1] == TARGET_WIDTH) == (
        translation.length - translation.num_sinks
    )


def test_each_key_is_turned_back_once_and_turned_once(pair):
    source, target = pair
    ids = random_ids(source, 1, LENGTH)
    cache = DynamicCache(config=source.config)
    read_into_cache(source, cache, ids)
    with Operations() as operations:
        source_kv = SourceKV.from_cache(cache, source, ids)
    tables = 1  # whose scale is a sum of squares
    assert operations.calls["addcmul_"] == 2 * len(source_kv.features) + tables
    translation = Translation(source_kv, random_mapper(source, target), target)
    operations = counted(translation, 2)
    assert operations.calls["addcmul_"] == 2 * len(rows_of(operations, SOURCE_WIDTH)) // len(READ[2])


def test_keys_are_turned_into_the_tensor_that_is_given(pair):
    tables = Rotary.from_model(pair[1]).at(torch.arange(7)[None])
    keys = torch.randn(1, 2, 7, 24)
    expected = tables.apply(keys, 0)
    out = torch.empty(2, 7, 2, 24)[:1].transpose(1, 2)
    with Operations() as operations:
        assert tables.apply(keys, 0, out=out) is out
    assert torch.equal(out, expected)
    assert not [shape for _, shape in operations.moves if shape.numel()]
    assert torch.equal(tables.apply(keys, 0, out=keys), expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_few_rows(with_bias):
    """The factors are exchanged, and nothing else is different."""
    weight, bias = torch.randn(1024, 512), torch.randn(1024) if with_bias else None
    for shape, exchanged in (((1, 8), True), ((2, 3), True), ((1, 1), False), ((1, 33), False)):
        states = torch.randn(*shape, 512)
        with FewRows(), Operations() as operations:
            output = linear(states, weight, bias)
        (product,) = operations.products
        assert (product.factors[0] == (1024, 512)) == exchanged
        assert output.is_contiguous()
        torch.testing.assert_close(output, linear(states, weight, bias), rtol=1e-5, atol=1e-4)


def test_what_is_not_exchanged():
    states = torch.randn(1, 8, 512)
    small, narrow, double = torch.randn(512, 512), torch.randn(300, 2048), torch.randn(1024, 512).double()
    for weight in (small, narrow, double):
        rows = torch.randn(1, 8, weight.shape[1], dtype=weight.dtype)
        with FewRows(), Operations() as operations:
            linear(rows, weight)
        assert operations.products[0].factors[0] == (8, weight.shape[1])
    with Operations() as operations:
        linear(states, torch.randn(1024, 512))
    assert operations.products[0].factors[0] == (8, 512)


def test_a_reading_of_few_tokens_exchanges_the_head():
    model = tiny_model("llama", vocab_size=8192)
    ids = random_ids(model, 1, 8)
    with Operations() as operations:
        logits = read_into_cache(model, DynamicCache(config=model.config), ids, num_logits=8)
    assert ((8192, 64), (64, 8)) in [product.factors for product in operations.products]
    torch.testing.assert_close(logits, model(ids).logits)


def test_a_translated_layer_is_a_stock_layer(pair):
    """What decodes after a handoff is what decodes after a prefill: no operation more."""
    source, target = pair
    ids = random_ids(source, 1, 40)
    cache = ungated_cache(SourceKV.prefill(source, None, ids), random_mapper(source, target), target)
    native = DynamicCache(config=target.config)
    read_into_cache(target, native, ids[:, :-1])
    for side in (cache, native):
        read_into_cache(target, side, ids[:, -1:])
    calls = []
    for side in (cache, native):
        with Operations() as operations:
            read_into_cache(target, side, ids[:, :1])
        calls.append(operations.calls)
    assert calls[0] == calls[1]
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in native.layers]

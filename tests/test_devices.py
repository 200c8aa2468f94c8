"""Targets and sources whose weights are not all where the computation is, or are not plain numbers."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_kvtransfer import KVMapper, SourceKV
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.rotary import Rotary

from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache, with_native_layers


LENGTH = 45


def generate(model, ids, cache=None):
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    if cache is not None:
        options[cache_argument(model)] = cache
    output = model.generate(ids, **options)
    return output.sequences, torch.stack(output.logits)


def assert_native(target, ids, cache, native=None):
    sequences, logits = generate(target, ids, cache)
    native_sequences, native_logits = generate(target, ids) if native is None else native
    assert torch.equal(sequences, native_sequences)
    torch.testing.assert_close(logits, native_logits, rtol=0, atol=1e-5)


@torch.no_grad()
def permuted(source):
    """
    A planted target that stays planted when both are quantised, and its exact mapper: KV heads change places, keys are
    doubled where queries are halved, and the values of a head change places. Rows and blocks of weights keep their
    numbers or double them.
    """
    target, mapper = copy.deepcopy(source), identity_mapper(source)
    config = source.config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, mapper_head_dim(mapper)
    order, values = torch.arange(kv_heads).flip(0), torch.arange(head_dim).roll(3)
    query_order = (order[:, None] * (heads // kv_heads) + torch.arange(heads // kv_heads)).flatten()
    rows = torch.arange(kv_heads * head_dim).view(kv_heads, head_dim)
    key_rows, value_rows = rows[order].flatten(), rows[order][:, values].flatten()
    query_rows = torch.arange(heads * head_dim).view(heads, head_dim)[query_order]
    for layer, layer_map in zip(target.model.layers, mapper.layers, strict=True):
        attention = layer.self_attn
        attention.q_proj.weight.copy_(attention.q_proj.weight[query_rows.flatten()] / 2)
        attention.k_proj.weight.copy_(attention.k_proj.weight[key_rows] * 2)
        attention.v_proj.weight.copy_(attention.v_proj.weight[value_rows])
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, query_rows[:, values].flatten()])
        width = len(key_rows)
        weight = torch.eye(2 * width)
        layer_map.weight.copy_(torch.cat([2 * weight[key_rows], weight[width + value_rows]]))
    return target, mapper


def mapper_head_dim(mapper):
    return mapper.target_geometry.layers[0].key_head_dim


def offloaded(model, of_layers, folder=None, **options):
    """The model with its layers on these devices, the rest on the CPU, computing there."""
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places = rest | {f"model.layers.{i}": place for i, place in enumerate(of_layers)}
    return dispatch_model(copy.deepcopy(model), places, main_device="cpu", offload_dir=folder, **options)


# transformers#32624, transformers#33147, transformers#33303, transformers#28051, huggingface/peft#2189
def test_a_planted_target_on_disk(tmp_path):
    source = tiny_model("llama")
    plain, mapper = permuted(source)
    ids = random_ids(source, 1, LENGTH)
    source_kv = SourceKV.prefill(source, None, ids)
    target = offloaded(plain, ["cpu", "disk", "disk", "cpu"], str(tmp_path))
    assert target.model.layers[1].self_attn.q_proj.weight.is_meta
    native = generate(plain, ids)
    assert_native(target, ids, ungated_cache(source_kv, mapper, target), native)
    behind_native_layers = with_native_layers(mapper, 1)
    assert_native(target, ids, ungated_cache(source_kv, behind_native_layers, target), native)
    # The control: the identity is not the map of this pair.
    _, logits = generate(target, ids, ungated_cache(source_kv, identity_mapper(source), target))
    assert (logits[0] - native[1][0]).abs().max() > 1e-2


def test_an_offloaded_source(tmp_path):
    model = tiny_model("gemma3")
    ids = random_ids(model, 1, LENGTH)
    source = offloaded(model, ["disk", "cpu"] * 2, str(tmp_path))
    assert_native(model, ids, ungated_cache(SourceKV.prefill(source, None, ids), identity_mapper(model), model))


def test_a_target_offloaded_as_a_whole(tmp_path):
    """Embeddings too: token features are then read once, and not once for each layer and block of tokens."""
    model = tiny_model("gemma3")
    ids = random_ids(model, 1, LENGTH)
    everything = {name: "disk" for name, _ in model.named_children()}
    target = dispatch_model(copy.deepcopy(model), everything, main_device="cpu", offload_dir=str(tmp_path))
    embeddings = target.get_input_embeddings()
    assert embeddings.weight.is_meta
    config = copy.deepcopy(identity_mapper(model).config)
    config.token_features = 64
    mapper = KVMapper(config).eval()
    with torch.no_grad():
        for layer_map, plain in zip(mapper.layers, identity_mapper(model).layers, strict=True):
            layer_map.weight[:, :-64] = plain.weight
            layer_map.weight[:, -64:] = 0
    cache = ungated_cache(SourceKV.prefill(model, None, ids), mapper, target)
    loads = []
    hook = embeddings.register_forward_pre_hook(lambda *_: loads.append(None))
    for layer in cache.layers:
        assert layer.keys is not None
    hook.remove()
    assert len(loads) == 1
    assert_native(target, ids, cache, generate(model, ids))


def test_layers_on_another_device_are_translated_there():
    """Of a device without numbers the placement is seen: where a layer computes, its cache and its map are."""
    target = tiny_model("llama")
    mapper = identity_mapper(target)
    ids = random_ids(target, 1, LENGTH)
    source_kv = SourceKV.prefill(target, None, ids)
    Rotary.from_model(target)  # probed while it has numbers
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), "cpu") | {"model.norm": "meta", "lm_head": "meta"}
    places = ["cpu", "cpu", "meta", "meta"]
    dispatch_model(target, rest | {f"model.layers.{i}": p for i, p in enumerate(places)}, main_device="cpu")
    target._hf_hook.io_same_device = False  # there is no way back from meta
    cache = ungated_cache(source_kv, mapper, target)
    with torch.no_grad():
        target(ids[:, -1:], position_ids=torch.tensor([[LENGTH - 1]]), **{cache_argument(target): cache})
    assert [layer.keys.device.type for layer in cache.layers] == places
    assert [layer.keys.shape[2] for layer in cache.layers] == [LENGTH] * 4
    # The weights would be lost there.
    assert all(weight.device.type == "cpu" for weight in mapper.parameters())


def test_two_simulated_devices():
    """In a process of its own: the simulation registers a device with torch."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.on_simulated_devices"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "as native"


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 1e-5),
        # Activations are rounded too; without a threshold they are, whatever other tokens are in the same call.
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, 2e-2),
    ],
    ids=["4 bits", "8 bits"],
)
def test_bitsandbytes(options, atol, tmp_path):
    pytest.importorskip("bitsandbytes")
    plain = tiny_model("llama", intermediate_size=128)  # whole blocks of 64
    models = []
    planted, mapper = permuted(plain)
    for name, model in (("source", plain), ("target", planted)):
        model.save_pretrained(tmp_path / name)
        config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name, quantization_config=config).eval())
    source, target = models
    ids = random_ids(plain, 1, LENGTH)
    source_kv = SourceKV.prefill(source, None, ids)
    native = generate(target, ids)
    cache = ungated_cache(source_kv, mapper, target)
    sequences, logits = generate(target, ids, cache)
    assert torch.equal(sequences, native[0])
    torch.testing.assert_close(logits, native[1], rtol=0, atol=atol)
    assert not torch.allclose(native[1][0], generate(planted, ids)[1][0], atol=1e-2)  # it is quantised
    _, logits = generate(target, ids, ungated_cache(source_kv, identity_mapper(plain), target))
    assert (logits[0] - native[1][0]).abs().max() > 0.1


def test_requests_in_threads_share_a_mapper():
    """Each with a source and a cache of its own, two of them copies of one cache."""
    model = tiny_model("gemma3")
    mapper = with_native_layers(identity_mapper(model), 1)
    prompts = [random_ids(model, 1, LENGTH, seed=seed) for seed in range(4)]
    expected = [generate(model, prompt) for prompt in prompts]
    caches = [ungated_cache(SourceKV.prefill(model, None, prompt), mapper, model) for prompt in prompts]
    requests = [*zip(prompts, caches, expected, strict=True), (prompts[0], copy.deepcopy(caches[0]), expected[0])]
    ready, failures = threading.Barrier(len(requests)), []

    def serve(prompt, cache, native):
        ready.wait()
        try:
            assert_native(model, prompt, cache, native)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=request) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_a_map_that_moves_is_left_to_who_is_using_it():
    mapper = identity_mapper(tiny_model("llama"))
    in_use = mapper.layers[1]
    assert mapper.layer_on(1, torch.device("cpu"), torch.float32) is in_use
    elsewhere = mapper.layer_on(1, torch.device("meta"), torch.float32)
    assert {weight.device.type for weight in elsewhere.parameters()} == {"meta"}
    assert elsewhere.source_layers == in_use.source_layers
    assert {weight.device.type for weight in in_use.parameters()} == {"cpu"}

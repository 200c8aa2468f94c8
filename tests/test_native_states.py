"""What a model's first layers make of a context, against a whole prefill; and that nothing behind them runs."""

import copy
import threading

import pytest
import torch
from accelerate import dispatch_model
from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig, GPT2Config, GPT2LMHeadModel

from hf_kvtransfer import UnsupportedModelError
from hf_kvtransfer.compat import cache_argument, read_into_cache
from hf_kvtransfer.native_states import AttentionInput, read_first_layers
from hf_kvtransfer.padding import pad_rows, positions_from_mask
from hf_kvtransfer.probe import probe_model

from .tiny_models import random_ids, tiny_model


FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")


def build(family):
    if family != "gpt2":
        return tiny_model(family)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_embd=64, n_layer=4, n_head=4, n_positions=128, initializer_range=0.15)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build(request.param)


def modules_of_layers(model):
    """The modules that make up each layer."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def whole_prefill(model, input_ids, **arguments):
    """Every layer's keys and values, and what every layer's attention is called with."""
    inputs = {}

    def listen(layer_idx):
        def hook(module, args, kwargs):
            inputs[layer_idx] = kwargs.get("hidden_states", args[0] if args else None)

        return hook

    names = [layer.attention for layer in probe_model(model).layers]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(listen(i), with_kwargs=True)
        for i, name in enumerate(names)
    ]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    read_into_cache(model, cache, input_ids, **arguments)
    for hook in hooks:
        hook.remove()
    return [(layer.keys, layer.values) for layer in cache.layers], inputs


def assert_equals_prefill(states, prefill, num_layers):
    layers, inputs = prefill
    assert len(states.keys_and_values) == num_layers + 1
    for found, expected in zip(states.keys_and_values, layers, strict=False):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)
    torch.testing.assert_close(states.hidden_states, inputs[num_layers])


@pytest.mark.parametrize("num_layers", [0, 2, 3])
def test_equals_a_whole_prefill(model, num_layers):
    ids = random_ids(model, 2, 50)  # longer than Gemma's windows
    states = read_first_layers(model, ids, num_layers=num_layers)
    assert_equals_prefill(states, whole_prefill(model, ids), num_layers)
    assert not states.hidden_states.requires_grad
    assert not any(tensor.requires_grad for layer in states.keys_and_values for tensor in layer)


def test_left_padded_rows(model):
    ids, mask = pad_rows([random_ids(model, n, seed=n) for n in (47, 20)])
    arguments = {"attention_mask": mask, "position_ids": positions_from_mask(mask)}
    states = read_first_layers(model, ids, **arguments, num_layers=2)
    assert_equals_prefill(states, whole_prefill(model, ids, **arguments), 2)
    alone = read_first_layers(model, ids[1:, 27:], num_layers=2)
    torch.testing.assert_close(states.hidden_states[1:, 27:], alone.hidden_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_nothing_behind_the_last_projections_runs(model, num_layers):
    probe_model(model)  # which runs the whole model, once in its life
    attention = model.get_submodule(probe_model(model).layers[num_layers].attention)
    layers = modules_of_layers(model)
    begun, ended = [], []
    hooks = [layer.register_forward_pre_hook(lambda *_, i=i: begun.append(i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(lambda *_, i=i: ended.append(i)) for i, layer in enumerate(layers)]
    hooks += [module.register_forward_hook(lambda *_: ended.append("end")) for module in (attention, model.lm_head)]
    read_first_layers(model, random_ids(model, 1, 12), num_layers=num_layers)
    for hook in hooks:
        hook.remove()
    assert begun == list(range(num_layers + 1))
    assert ended == list(range(num_layers))
    assert not attention._forward_pre_hooks


def test_another_thread_may_run_the_same_model():
    model = tiny_model("llama")
    ids, others = random_ids(model, 1, 30), random_ids(model, 1, 9, seed=1)
    expected = read_first_layers(model, ids, num_layers=2)
    last = model.model.layers[2].self_attn

    def run_other_thread(module, args):
        # While the listener waits, another thread is done with all of the model.
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=whole_prefill, args=(model, others))
            thread.start()
            thread.join()

    first = model.model.layers[0].register_forward_pre_hook(run_other_thread)
    between = last.q_proj.register_forward_pre_hook(run_other_thread)
    states = read_first_layers(model, ids, num_layers=2)
    first.remove()
    between.remove()
    assert torch.equal(states.hidden_states, expected.hidden_states)
    assert torch.equal(states.keys_and_values[2][0], expected.keys_and_values[2][0])


def test_a_listener_may_go_while_another_thread_is_about_to_call_it():
    model = tiny_model("llama")
    ids, listener = random_ids(model, 1, 9), AttentionInput(model, 1)
    attention = model.get_submodule(probe_model(model).layers[1].attention)
    first = attention.register_forward_pre_hook(lambda module, args: listener.__exit__())
    failures = []

    def run():
        try:
            whole_prefill(model, ids)
        except Exception as error:
            failures.append(error)

    listener.__enter__()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    first.remove()
    assert failures == []


def test_failures_leave_no_hook():
    model = tiny_model("llama")
    attention = model.get_submodule(probe_model(model).layers[1].attention)
    with pytest.raises(IndexError):
        read_first_layers(model, torch.tensor([[model.config.vocab_size]]), num_layers=1)
    assert not attention._forward_pre_hooks


def test_layers_that_cache_nothing_are_skipped():
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, hidden_size_per_layer_input=8, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, sliding_window=8,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4, pad_token_id=0,
    )  # fmt: skip
    model = Gemma3nForCausalLM(config).eval()
    states = read_first_layers(model, random_ids(model, 1, 20), num_layers=1)
    assert [keys.shape[2] for keys, _ in states.keys_and_values] == [20, 20]
    with pytest.raises(ValueError, match=r"no layer 2 that caches keys and values of its own, only layers \[0, 1\]"):
        read_first_layers(model, random_ids(model, 1, 20), num_layers=2)


def test_a_model_that_fills_no_cache_is_refused():
    """As models did with gradient checkpointing, up to transformers 5.23."""
    model = tiny_model("llama")
    probe_model(model)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {cache_argument(model): None, "use_cache": False}),
        with_kwargs=True,
    )
    with pytest.raises(UnsupportedModelError, match=r"without giving .* layer 1 to its cache. Call `model.eval\(\)`"):
        read_first_layers(model, random_ids(model, 1, 9), num_layers=1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_inside_a_peft_wrapper():
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    ids = random_ids(model, 1, 20)
    plain = read_first_layers(model, ids, num_layers=2)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    states = read_first_layers(adapted, ids, num_layers=2)
    assert_equals_prefill(states, whole_prefill(adapted.get_base_model(), ids), 2)
    assert not torch.allclose(states.keys_and_values[0][1], plain.keys_and_values[0][1])


@pytest.mark.parametrize("whole_layers", [False, True])
def test_an_offloaded_model(tmp_path, whole_layers):
    model = tiny_model("llama")
    ids = random_ids(model, 1, 20)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(4)}
    target = dispatch_model(
        copy.deepcopy(model),
        places,
        main_device="cpu",
        offload_dir=str(tmp_path),
        preload_module_classes=["LlamaDecoderLayer"] if whole_layers else None,
    )
    states = read_first_layers(target, ids, num_layers=2)
    assert_equals_prefill(states, whole_prefill(model, ids), 2)
    assert all(weight.device.type == "meta" for weight in target.model.layers.parameters())

    # Also in the middle of a forward pass, whose own layer is loaded.
    inner = []

    def read(module, args, kwargs):
        if not inner:
            inner.append(None)
            inner[0] = read_first_layers(target, ids, num_layers=2)

    hook = target.model.layers[1].self_attn.q_proj.register_forward_pre_hook(read, with_kwargs=True)
    logits = target(ids).logits
    hook.remove()
    assert_equals_prefill(inner[0], whole_prefill(model, ids), 2)
    torch.testing.assert_close(logits, model(ids).logits)
    assert all(weight.device.type == "meta" for weight in target.model.layers.parameters())

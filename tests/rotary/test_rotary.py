import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache

from hf_kvtransfer.errors import UnsupportedModelError
from hf_kvtransfer.rotary import Rotary

from ..generation.families import EXPERTS, LATENT, LINEAR, rope


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def without(*names):
    return {name: value for name, value in SMALL.items() if name not in names}


def build(name, dtype=torch.float32):
    config_class, parameters = FAMILIES[name]
    config = getattr(transformers, f"{config_class}Config")(**parameters)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms are born as ones or zeros, which would hide a norm that is missed or taken twice.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


FAMILIES = {
    "llama": ("Llama", SMALL),
    "llama-linear": ("Llama", SMALL | rope("linear", factor=4.0)),
    "llama-yarn": ("Llama", SMALL | rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-llama3": (
        "Llama",
        SMALL
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-dynamic": ("Llama", SMALL | rope("dynamic", factor=4.0)),
    "qwen3": ("Qwen3", SMALL),
    "qwen3_moe": (
        "Qwen3Moe",
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma3": ("Gemma3Text", SMALL | SLIDING_AND_FULL),
    "mistral": ("Mistral", SMALL | {"sliding_window": 8}),
    "mixtral": ("Mixtral", SMALL | EXPERTS),
    "phi3-longrope": (
        "Phi3",
        without("head_dim")
        | {"original_max_position_embeddings": 64}
        | rope(
            "longrope",
            short_factor=[1.0, 1.5, 2.0, 2.5],
            long_factor=[3.0, 4.0, 5.0, 6.0],
            original_max_position_embeddings=64,
        ),
    ),
    "phi": ("Phi", without("head_dim") | rope("default", partial_rotary_factor=0.5)),
    "gpt_neox": ("GPTNeoX", without("head_dim", "num_key_value_heads") | rope("default", partial_rotary_factor=0.25)),
    "cohere": ("Cohere", without("head_dim")),
    "glm4": ("Glm4", SMALL | rope("default", partial_rotary_factor=0.5)),
    "llama4": (
        "Llama4Text",
        SMALL
        | EXPERTS
        | {"num_hidden_layers": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 16, "num_experts_per_tok": 1},
    ),
    "gpt_oss": ("GptOss", SMALL | EXPERTS | SLIDING_AND_FULL),
    "smollm3": ("SmolLM3", without("head_dim") | {"num_hidden_layers": 4}),
    "olmo2": ("Olmo2", without("head_dim")),
    # M-RoPE: the rotary module is given three rows of positions.
    "qwen3_5": (
        "Qwen3_5Text",
        SMALL
        | {"layer_types": ["full_attention"] * 2}
        | rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
    ),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}

# layout, offset, rotary_dim of each layer
EXPECTED = {name: [("half", 0, 16)] * 2 for name in FAMILIES} | {
    "phi3-longrope": [("half", 0, 8)] * 2,
    "phi": [("half", 0, 4)] * 2,
    "gpt_neox": [("half", 0, 2)] * 2,
    "cohere": [("interleaved", 0, 8)] * 2,
    "glm4": [("interleaved", 0, 8)] * 2,
    "llama4": [("interleaved", 0, 16)] * 3 + [("none", 0, 0)],
    "qwen3_5": [("half", 0, 8)] * 2,
    "smollm3": [("half", 0, 8)] * 3 + [("none", 0, 0)],
    "olmo2": [("half", 0, 8)] * 2,
    "gpt2": [("none", 0, 0)] * 2,
}


@torch.no_grad()
def cached_keys(model, input_ids, position_ids):
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    # Without a config no layer forgets what has left its window.
    cache = DynamicCache()
    model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **{name: cache})
    return [layer.keys for layer in cache.layers]


def example(tokens=24):
    # A left-padded row next to one that is not.
    input_ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(1))
    position_ids = torch.stack([torch.arange(tokens), (torch.arange(tokens) - 5).clamp_min(0)])
    return input_ids, position_ids


def error(actual, expected):
    actual, expected = actual.float(), expected.float()
    return ((actual - expected).norm() / expected.norm()).item()


# transformers#24653, transformers#27227, vllm#3488
@pytest.mark.parametrize("name", FAMILIES)
def test_keys_move_to_other_positions(name):
    model = build(name)
    rotary = Rotary.from_model(model)
    assert [(layer.layout, layer.offset, layer.rotary_dim) for layer in rotary.layers] == EXPECTED[name]

    input_ids, position_ids = example()
    other_position_ids = position_ids + 9 + torch.arange(position_ids.shape[1]) // 3
    keys = cached_keys(model, input_ids, position_ids)
    other_keys = cached_keys(model, input_ids, other_position_ids)
    tables, other_tables = rotary.at(position_ids), rotary.at(other_position_ids)
    for layer_idx, key_states in enumerate(keys):
        removed = tables.remove(key_states, layer_idx)
        assert error(tables.apply(removed, layer_idx), key_states) < 1e-5
        if rotary.layers[layer_idx].layout == "none":
            assert torch.equal(removed, key_states)
        else:
            assert error(removed, key_states) > 1e-2

    # Only in the first layer are keys without a position the same at all positions.
    removed = tables.remove(keys[0], 0)
    if name == "gpt2":
        assert error(other_tables.apply(removed, 0), other_keys[0]) > 1e-2  # learned positions are in the keys to stay
    else:
        assert error(other_tables.apply(removed, 0), other_keys[0]) < 1e-5
        assert error(tables.apply(removed, 0), other_keys[0]) > 1e-2
        assert error(rotary.at(other_position_ids + 1).apply(removed, 0), other_keys[0]) > 1e-2


@pytest.mark.parametrize(
    ("name", "module", "heads_first"),
    [
        ("llama", "k_proj", None),
        ("llama-yarn", "k_proj", None),
        ("mistral", "k_proj", None),
        ("smollm3", "k_proj", None),
        ("gpt_oss", "k_proj", None),
        ("cohere", "k_proj", None),
        ("glm4", "k_proj", None),
        ("olmo2", "k_norm", None),
        ("qwen3", "k_norm", False),
        ("gemma3", "k_norm", True),
    ],
)
def test_remove_gives_the_keys_before_the_embedding(name, module, heads_first):
    model = build(name)
    captured = []
    for key, submodule in model.named_modules():
        if key.endswith(f".{module}"):
            submodule.register_forward_hook(lambda module, args, output: captured.append(output))
    tables = Rotary.from_model(model).at(example()[1])
    captured.clear()
    keys = cached_keys(model, *example())
    assert len(captured) == len(keys) == model.config.num_hidden_layers
    for layer_idx, (key_states, before) in enumerate(zip(keys, captured, strict=True)):
        if heads_first is None:
            before = before.unflatten(-1, (-1, key_states.shape[-1]))
        if not heads_first:
            before = before.transpose(1, 2)
        assert before.shape == key_states.shape
        assert error(tables.remove(key_states, layer_idx), before) < 1e-5


def test_attention_scaling_is_undone():
    model = build("llama-yarn")
    input_ids, position_ids = example()
    key_states = cached_keys(model, input_ids, position_ids)[1]
    removed = Rotary.from_model(model).at(position_ids).remove(key_states, 1)
    assert model.model.rotary_emb.attention_scaling > 1.1
    scaling = key_states.norm() / removed.norm()
    torch.testing.assert_close(scaling.item(), model.model.rotary_emb.attention_scaling, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "gpt_oss"])
def test_bfloat16(name):
    model = build(name, torch.bfloat16)
    input_ids, position_ids = example()
    tables = Rotary.from_model(model).at(position_ids)
    for layer_idx, key_states in enumerate(cached_keys(model, input_ids, position_ids)):
        in_float32 = tables.remove(key_states, layer_idx, out=torch.empty_like(key_states, dtype=torch.float32))
        assert in_float32.dtype == torch.float32
        in_bfloat16 = tables.remove(key_states, layer_idx)
        assert in_bfloat16.dtype == torch.bfloat16
        # A key that keeps its float32 in between comes back as it was; one that is rounded loses half a bit.
        back = tables.apply(in_float32, layer_idx, out=torch.empty_like(key_states))
        assert error(back, key_states) < 1e-4
        assert error(tables.apply(in_bfloat16, layer_idx), key_states) < 4e-3


@pytest.mark.parametrize("name", ["llama", "phi", "cohere", "glm4", "gpt2"])
def test_out_and_ranges(name):
    model = build(name)
    input_ids, position_ids = example()
    tables = Rotary.from_model(model).at(position_ids)
    key_states = cached_keys(model, input_ids, position_ids)[1]
    removed = tables.remove(key_states, 1).clone()

    in_place = key_states.clone()
    assert tables.remove(in_place, 1, out=in_place) is in_place
    assert torch.equal(in_place, removed)
    assert tables.apply(in_place, 1, out=in_place) is in_place
    assert error(in_place, key_states) < 1e-5

    transposed = torch.empty_like(key_states.transpose(1, 2).contiguous()).transpose(1, 2)
    strided = key_states.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(tables.remove(strided, 1, out=transposed), removed)

    part = tables.apply(removed[:, :, 4:9], 1, start=4, stop=9)
    assert torch.equal(part, tables.apply(removed, 1)[:, :, 4:9])
    if name != "gpt2":
        assert error(tables.apply(removed[:, :, 4:9], 1, start=5, stop=10), part) > 1e-2
    with pytest.raises(ValueError, match="5 tokens .* 20 position ids"):
        tables.apply(removed[:, :, 4:9], 1, start=4)
    with pytest.raises(ValueError, match=r"\[batch, tokens\]"):
        Rotary.from_model(model).at(position_ids[0])


@pytest.mark.parametrize("name", ["llama", "glm4"])
def test_long_keys_are_rotated_block_by_block(name, monkeypatch):
    model = build(name)
    input_ids, position_ids = example()
    key_states = cached_keys(model, input_ids, position_ids)[1]
    tables = Rotary.from_model(model).at(position_ids)
    expected = tables.remove(key_states, 1)
    # Seven tokens at a time, which does not divide their number.
    monkeypatch.setattr("hf_kvtransfer.rotary.rotary._CPU_BLOCK", 7 * key_states[:, :, :1].numel())
    assert torch.equal(tables.remove(key_states, 1), expected)
    in_place = key_states.clone()
    assert torch.equal(tables.remove(in_place, 1, out=in_place), expected)
    assert tables.apply(key_states[:, :, :0], 1, start=3, stop=3).shape[2] == 0


def test_one_row_of_positions_serves_a_batch():
    model = build("llama")
    position_ids = torch.arange(24)[None]
    keys = cached_keys(model, example()[0], position_ids.expand(2, -1))
    rotary = Rotary.from_model(model)
    expected = rotary.at(position_ids.expand(2, -1)).remove(keys[0], 0)
    assert torch.equal(rotary.at(position_ids).remove(keys[0], 0), expected)


def test_layers_of_one_type_share_one_call():
    model = build("gemma3")
    rotary = Rotary.from_model(model)
    assert len(rotary.calls) == 2
    assert {call.layer_type for call in rotary.calls} == {"sliding_attention", "full_attention"}
    sliding = rotary.calls[rotary.layers[0].call_idx]
    assert sliding.layer_type == "sliding_attention"

    calls = []
    hook = model.model.rotary_emb.register_forward_hook(lambda module, args, output: calls.append(1))
    tables = rotary.at(torch.arange(4)[None])
    assert not calls
    for _ in range(2):
        tables.apply(torch.randn(1, 2, 4, 16), 0)
        tables.remove(torch.randn(1, 2, 4, 16), 1)
    hook.remove()
    assert len(calls) == 2


def test_probing_leaves_the_model_as_it_was():
    model = build("llama")
    model.train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    rotary = Rotary.from_model(model)
    assert Rotary.from_model(model) is rotary
    assert [module.training for module in model.modules()] == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    # A cast changes how cos and sin are rounded.
    assert Rotary.from_model(model.to(torch.bfloat16)) is not rotary


def test_dropout_does_not_disturb_the_probe():
    model = build("gpt2").train()
    assert [layer.layout for layer in Rotary.from_model(model).layers] == ["none", "none"]


# transformers#25104
@pytest.mark.parametrize(("name", "length"), [("llama-dynamic", 128), ("phi3-longrope", 64)])
def test_refuses_length_dependent_embeddings_beyond_their_original_length(name, length):
    model = build(name)
    rotary = Rotary.from_model(model)
    rotary.check_length(length)
    module = model.model.rotary_emb
    before = module.inv_freq.clone()
    rotary.at(torch.tensor([[0, length - 1]])).apply(torch.randn(1, 2, 2, EXPECTED[name][0][2]), 0)
    for refused in (
        lambda: rotary.check_length(length + 1),
        lambda: rotary.at(torch.tensor([[0, length]])),
    ):
        with pytest.raises(UnsupportedModelError, match=f"original {length} positions .* {length + 1} positions"):
            refused()
    assert torch.equal(module.inv_freq, before)


def test_other_embeddings_have_no_length():
    Rotary.from_model(build("llama-yarn")).check_length(10**6)


GPTJ = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=4)


# LMCache positional_encoding.py
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTJ, "Layer 0 of GPTJForCausalLM rotates its keys in"),
        (
            transformers.DeepseekV3Config(**without("head_dim") | LATENT),
            "Layer 0 of DeepseekV3ForCausalLM caches a compressed latent",
        ),
        (
            transformers.Qwen3_5TextConfig(**SMALL | LINEAR),
            "Layer 1 of Qwen3_5ForCausalLM caches a LinearAttentionLayer: a recurrent",
        ),
        (
            transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
    ],
)
def test_refuses_what_it_cannot_move(config, message):
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=message) as info:
        Rotary.from_model(model)
    assert config.is_encoder_decoder or "Re-prefill this model" in str(info.value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_rotary_inside_an_attention_is_refused():
    # As in Hub code whose attention is given nothing but position ids. Learned positions look the same from outside,
    # but with those the keys do not follow the ids.
    model = build("llama")

    def hide_embeddings(forward):
        def hidden(hidden_states, position_ids, position_embeddings, **kwargs):
            embeddings = model.model.rotary_emb.forward(hidden_states, position_ids)
            return forward(hidden_states, position_embeddings=embeddings, **kwargs)

        return hidden

    for layer in model.model.layers:
        layer.self_attn.forward = hide_embeddings(layer.self_attn.forward)
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"position_embeddings": None}), with_kwargs=True
        )
    with pytest.raises(UnsupportedModelError, match="inside its attention"):
        Rotary.from_model(model)


def test_offloaded_model(tmp_path):
    from accelerate import dispatch_model

    expected = Rotary.from_model(build("llama")).layers
    model = build("llama")
    device_map = {
        "model.embed_tokens": "disk",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    model = dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert Rotary.from_model(model).layers == expected
    assert model.model.layers[0].self_attn.k_proj.weight.device.type == "meta"

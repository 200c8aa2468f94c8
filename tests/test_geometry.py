import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma3TextConfig, GPT2Config, LlamaConfig

from hf_kvtransfer.geometry import KVGeometry, LayerGeometry


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


# LMCache#688, vllm#2622, NVIDIA/Model-Optimizer#2482, NVIDIA/kvpress#213
def test_head_dim_is_read_from_the_keys():
    geometry = KVGeometry.from_model(build(LlamaConfig(**SMALL)))
    assert geometry == KVGeometry((LayerGeometry(2, 24, 24, None),) * 3)
    assert geometry.num_features(0) == 2 * 48
    assert geometry.describe() == "3 layers of 2 KV heads x 24"


def test_a_model_without_key_value_heads_in_its_config():
    geometry = KVGeometry.from_model(build(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32)))
    assert geometry == KVGeometry((LayerGeometry(4, 8, 8, None),))
    assert geometry.describe() == "1 layer of 4 KV heads x 8"


def test_windows():
    # A window shorter than the probe.
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**SMALL, layer_types=layer_types, sliding_window=6)
    geometry = KVGeometry.from_model(build(config))
    assert [layer.sliding_window for layer in geometry.layers] == [6, None, 6]
    assert geometry.describe() == "2 layers of 2 KV heads x 24, window 6, 1 layer of 2 KV heads x 24"
    assert KVGeometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry


def test_layers_that_share_keys_and_values():
    config = Gemma3nTextConfig(
        **(SMALL | {"num_hidden_layers": 4, "intermediate_size": [64] * 4}),
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4,
    )
    geometry = KVGeometry.from_model(build(config))
    assert geometry.layers[:2] == (LayerGeometry(2, 24, 24, 6), LayerGeometry(2, 24, 24, None))
    # Until transformers 5.23, the cache ended before the layers that share.
    assert all(layer is None for layer in geometry.layers[2:])


def test_dict_of_layers_without_a_cache_and_of_uneven_heads():
    geometry = KVGeometry((LayerGeometry(1, 16, 8, 4), None, None))
    assert geometry.to_dict() == {"layers": [[1, 16, 8, 4], None, None]}
    assert KVGeometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry
    assert geometry.num_features(0) == 24
    assert geometry.num_features(1) == 0
    assert geometry.describe() == (
        "1 layer of 1 KV head x 16 (keys), 8 (values), window 4, 2 layers without a cache of their own"
    )


@pytest.mark.parametrize(
    "geometry",
    [
        {},
        [[1, 8, 8, None]],
        {"layers": [[1, 8, 8]]},
        {"layers": [[1, 8, 0, None]]},
        {"layers": [[1, 8, 8.0, None]]},
        {"layers": [[True, 8, 8, None]]},
        {"layers": [[1, 8, 8, -1]]},
        {"layers": ["1888"]},
    ],
)
def test_damaged_dict(geometry):
    with pytest.raises(ValueError, match="geometry"):
        KVGeometry.from_dict(geometry)

"""Tiny random models of every family that the matrix covers, and of those that are refused."""

import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel


# A wide initialisation, so that attention and not only the last token decides what comes next.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 12}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}


def without(*names: str) -> dict:
    return {name: value for name, value in SMALL.items() if name not in names}


def rope(rope_type: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


LONG = {
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", without("head_dim")),
    "qwen3": ("Qwen3", SMALL),
    "qwen3-moe": ("Qwen3Moe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mistral": ("Mistral", SMALL | SLIDING),
    "ministral": ("Ministral", SMALL | MIXED),
    "mixtral": ("Mixtral", SMALL | EXPERTS),
    "gemma2": ("Gemma2", SMALL | MIXED | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        SMALL
        | MIXED
        | {
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            },
        },
    ),
    # The last two layers read what the first two have cached.
    "gemma3n": (
        "Gemma3nText",
        SMALL
        | SLIDING
        | {
            "num_hidden_layers": 4,
            "intermediate_size": [48] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
        },
    ),
    "phi3": ("Phi3", without("head_dim") | {"original_max_position_embeddings": 64} | rope("longrope", **LONG)),
    "gpt-oss": (
        "GptOss",
        SMALL | EXPERTS | MIXED | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama4": (
        "Llama4Text",
        SMALL
        | EXPERTS
        | {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 16, "num_experts_per_tok": 1},
    ),
    "smollm3": ("SmolLM3", without("head_dim") | {"num_hidden_layers": 4}),
    "glm4": ("Glm4", SMALL | rope("default", partial_rotary_factor=0.5)),
    "cohere": ("Cohere", without("head_dim") | {"logit_scale": 1.0}),
    "cohere2": ("Cohere2", SMALL | MIXED | {"logit_scale": 1.0}),
    "olmo2": ("Olmo2", without("head_dim")),
    "olmo3": ("Olmo3", without("head_dim") | MIXED),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
}

LINEAR = {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
STATE = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
UNSUPPORTED = {
    "mamba": (
        "Mamba",
        {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
        | {"state_size": 8, "bos_token_id": 1, "eos_token_id": None},
    ),
    "jamba": (
        "Jamba",
        without("head_dim")
        | STATE
        | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4, "num_experts": 2}
        | {"num_experts_per_tok": 1},
    ),
    "bamba": (
        "Bamba",
        without("head_dim") | STATE | {"attn_layer_indices": [0], "mamba_n_heads": 4, "mamba_d_head": 16},
    ),
    "qwen3-next": (
        "Qwen3Next",
        SMALL
        | LINEAR
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
        | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3.5": ("Qwen3_5Text", SMALL | LINEAR),
    "deepseek-v3": (
        "DeepseekV3",
        without("head_dim") | LATENT,
    ),
}


@functools.cache
def build(family: str, seed: int = 0) -> PreTrainedModel:
    """One model for all tests that ask for it: none may change it."""
    config_class, parameters = (FAMILIES | UNSUPPORTED)[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{config_class}Config")(**parameters)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and sinks are born as ones or zeros, which would hide one that is missed or taken twice.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model

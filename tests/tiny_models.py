"""Tiny random models built in code, and targets planted in them: the exact mapper is known."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_kvtransfer import FidelityGate, KVGeometry, KVMapper, KVMapperConfig, SourceKV, TranslatedCache
from hf_kvtransfer.translation import Translation


# A wide initialisation, so that attention and not only the last token decides what comes next.
COMMON = {
    "vocab_size": 400,  # room for the tokenizers in tiny_tokenizers.py
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral")
# Which source layers each target layer of a random mapper reads.
READ = ([0], [0, 1], [1, 3, 0], [3])


def tiny_model(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model of a family, with q/k norms, windows and two thetas, or experts as the family has them."""
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**COMMON | changes))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON | {"head_dim": 24} | changes))
    elif family == "gemma3":
        layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        rope = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        }
        special = {"head_dim": 24, "sliding_window": 32, "layer_types": layer_types, "rope_parameters": rope}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**COMMON | special | {"query_pre_attn_scalar": 24} | changes))
    else:
        model = MixtralForCausalLM(
            MixtralConfig(**COMMON | {"num_local_experts": 4, "sliding_window": None} | changes)
        )
    return model.eval()


@torch.no_grad()
def plant(source: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """
    A target that computes the same function as `source` with other keys and values: each layer's KV heads are
    permuted, keys turned and scaled plane by plane (which commutes with the rotary embedding), values mixed by an
    invertible matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    target = copy.deepcopy(source)
    config = target.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = target.model.layers[0].self_attn.head_dim
    groups = heads // kv_heads
    for layer in target.model.layers:
        attention = layer.self_attn
        order = torch.randperm(kv_heads, generator=generator)
        query_order = (order[:, None] * groups + torch.arange(groups)).flatten()
        q, k, v = (
            projection.weight.view(-1, head_dim, config.hidden_size).clone()
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        o = attention.o_proj.weight.view(config.hidden_size, heads, head_dim).clone()
        q, k, v, o = q[query_order], k[order], v[order], o[:, query_order]

        angle = torch.rand(head_dim // 2, generator=generator) * 6.28
        scale = 0.5 + torch.rand(head_dim // 2, generator=generator)
        turn = torch.zeros(head_dim, head_dim)
        low, high = torch.arange(head_dim // 2), torch.arange(head_dim // 2) + head_dim // 2
        turn[low, low] = turn[high, high] = angle.cos()
        turn[low, high], turn[high, low] = -angle.sin(), angle.sin()
        both = scale.repeat(2)
        if hasattr(attention, "k_norm"):  # the norm sees the turn only; the scale goes into its weight
            offset = 1 if "Gemma" in type(attention.k_norm).__name__ else 0
            attention.k_norm.weight.copy_((attention.k_norm.weight + offset) * both - offset)
            attention.q_norm.weight.copy_((attention.q_norm.weight + offset) / both - offset)
            q, k = turn @ q, turn @ k
        else:
            q, k = turn @ (q / both[:, None]), turn @ (k * both[:, None])
        mix = torch.eye(head_dim) + 0.3 * torch.randn(head_dim, head_dim, generator=generator)
        v, o = mix @ v, o @ torch.linalg.inv(mix)

        attention.q_proj.weight.copy_(q.reshape(-1, config.hidden_size))
        attention.k_proj.weight.copy_(k.reshape(-1, config.hidden_size))
        attention.v_proj.weight.copy_(v.reshape(-1, config.hidden_size))
        attention.o_proj.weight.copy_(o.reshape(config.hidden_size, -1))
    return target


def own_texts(model: PreTrainedModel, count: int, length: int, temperature: float, **options) -> torch.Tensor:
    """What a model writes itself: its next tokens depend on the context, which random ones do not."""
    torch.manual_seed(0)
    starts = random_ids(model, count, 8)
    options |= {"do_sample": True, "top_k": 0, "temperature": temperature}
    return model.generate(starts, max_new_tokens=length - 8, **options)


def identity_mapper(model: PreTrainedModel, sink_tokens: int = 4) -> KVMapper:
    """The exact mapper of a model to itself."""
    geometry = KVGeometry.from_model(model)
    side = {"name": "tiny", "geometry": geometry.to_dict(), "tokenizer": None}
    layers = [
        None if layer is None else {"kind": "linear", "source_layers": [i]} for i, layer in enumerate(geometry.layers)
    ]
    mapper = KVMapper(KVMapperConfig(source=side, target=side, layers=layers, sink_tokens=sink_tokens))
    with torch.no_grad():
        for i in mapper.config.mapped_layers:
            nn.init.eye_(mapper.layers[i].weight)
    return mapper.eval()


def planted_mapper(source: PreTrainedModel, target: PreTrainedModel, tokenizer: str | None = None) -> KVMapper:
    """The exact mapper between two models of which one was planted in the other, or both in a third."""
    ids = random_ids(source, 4, 80, seed=99)
    read = [SourceKV.prefill(model, None, ids) for model in (source, target)]
    sides = [
        {"name": name, "geometry": kv.geometry.to_dict(), "tokenizer": tokenizer}
        for name, kv in zip(("source", "target"), read, strict=True)
    ]
    layers = [{"kind": "linear", "source_layers": [i]} for i in range(len(read[0].features))]
    mapper = KVMapper(KVMapperConfig(source=sides[0], target=sides[1], layers=layers))
    with torch.no_grad():
        for layer_map, *states in zip(mapper.layers, *(kv.features for kv in read), strict=True):
            given, wanted = (features.flatten(0, 1).double() for features in states)
            layer_map.weight.copy_(torch.linalg.lstsq(given, wanted).solution.T)
    return mapper.eval()


def random_mapper(
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizers: tuple[str | None, str | None] = (None, None),
    token_features: int = 0,
    read: Sequence[Sequence[int]] = READ,
    previous_tokens: int = 0,
) -> KVMapper:
    """Linear maps with random weights; `read` are the source layers of each target layer."""
    sides = [
        {"name": "tiny", "geometry": KVGeometry.from_model(model).to_dict(), "tokenizer": tokenizer}
        for model, tokenizer in zip((source, target), tokenizers, strict=True)
    ]
    before = {"previous_tokens": previous_tokens} if previous_tokens else {}
    layers = [{"kind": "linear", "source_layers": list(chosen)} | before for chosen in read]
    config = KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=token_features)
    mapper, generator = KVMapper(config).eval(), torch.Generator().manual_seed(0)
    for weight in mapper.parameters():
        nn.init.normal_(weight, std=0.1, generator=generator)
    return mapper


def with_native_layers(mapper: KVMapper, native_layers: int, token_features: int = 64) -> KVMapper:
    """The same linear maps behind the target's own first layers, of whose hidden states they make nothing."""
    config = copy.deepcopy(mapper.config)
    config.layers[: native_layers + 1] = [{"kind": "native"}] * (native_layers + 1)
    config.token_features = token_features
    other = KVMapper(config).eval()
    with torch.no_grad():
        for i in other.config.mapped_layers:
            other.layers[i].weight[:, :-token_features] = mapper.layers[i].weight
            other.layers[i].bias.copy_(mapper.layers[i].bias)
    return other


def random_ids(model: PreTrainedModel, *shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids without special tokens."""
    return torch.randint(3, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def ungated_cache(*args, **options) -> TranslatedCache:
    """A cache through a mapper without evidence, which raises where it would otherwise be left empty."""
    return TranslatedCache(*args, gate=FidelityGate(strict=False), on_refusal="raise", **options)


def fail_from_layer(monkeypatch, first: int) -> None:
    """From now on no translation of a layer from `first` on succeeds."""
    layer = Translation.layer

    def broken(self, layer_idx, *args):
        if layer_idx >= first:
            raise RuntimeError("out of memory")
        return layer(self, layer_idx, *args)

    monkeypatch.setattr(Translation, "layer", broken)

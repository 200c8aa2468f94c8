"""Attention written out: it computes what the model does, is heard by those who ask, and leaves no trace."""

import threading

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
)

from hf_kvtransfer import UnsupportedModelError
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.fitting.written_out_attention import WrittenOutAttention

from ..tiny_models import COMMON, FAMILIES, random_ids, tiny_model


def other_model(family):
    torch.manual_seed(0)
    if family == "gemma2":  # scores capped low enough to matter, and windows
        capped = {"head_dim": 24, "attn_logit_softcapping": 2.0, "sliding_window": 16, "query_pre_attn_scalar": 4}
        return Gemma2ForCausalLM(Gemma2Config(**COMMON | capped)).eval()
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=64, n_layer=2, n_head=4, n_positions=128)).eval()
    experts = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    model = GptOssForCausalLM(GptOssConfig(**COMMON | experts)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def logits(model, ids):
    return read_into_cache(model, DynamicCache(), ids, num_logits=ids.shape[1])


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gpt2", "gpt_oss"])
def test_computes_what_the_model_does(family):
    model = tiny_model(family) if family in FAMILIES else other_model(family)
    model.set_attn_implementation("eager")
    ids = random_ids(model, 2, 40)
    expected = logits(model, ids)
    heard = {}
    with WrittenOutAttention(model) as attention:
        with attention.listen(lambda i, weights, output: heard.update({i: (weights, output)}), range(1, 9)):
            torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=1e-3)
        logits(model, ids[:, :3])
    assert model.config._attn_implementation == "eager"
    assert sorted(heard) == list(range(1, model.config.num_hidden_layers))
    weights, output = heard[1]
    assert weights.shape == (2, 4, 40, 40) and output.shape[:3] == (2, 40, 4)
    attentions = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(weights, attentions[1], atol=1e-5, rtol=1e-4)


def test_ends_behind_a_layer_and_hears_its_own_thread_only():
    model = tiny_model("llama")
    ids = random_ids(model, 1, 20)
    ran, heard = [], []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
    with WrittenOutAttention(model) as attention:
        ran.clear()
        with attention.listen(lambda i, weights, output: heard.append(i), [0, 1, 3], stop_behind=1):
            other = threading.Thread(target=logits, args=(model, ids))
            other.start()
            other.join()
            assert ran == [0, 1, 2, 3] and not heard
            ran.clear()
            logits(model, ids)
        assert heard == ran == [0, 1]
        logits(model, ids)
        assert heard == [0, 1]


def test_restores_what_there_was_after_an_error():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="out of memory"), WrittenOutAttention(model):
        raise RuntimeError("out of memory")
    assert model.config._attn_implementation == before


def test_other_attention_is_refused():
    config = BloomConfig(vocab_size=400, hidden_size=64, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="0 of 2 layers"), WrittenOutAttention(model):
        pass
    assert model.config._attn_implementation == before
    logits(model, random_ids(model, 1, 20))

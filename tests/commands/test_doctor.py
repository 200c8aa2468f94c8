import json

import pytest
from transformers import CONFIG_MAPPING

from ..tiny_models import COMMON, tiny_model
from .conftest import message


SMALL = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 400}
# Configs that say all there is to know: no weights, and some of models that would not fit on this machine.
CONFIGS = {
    "llama": COMMON,
    "qwen3": COMMON | {"head_dim": 24},
    "mixtral": COMMON | {"num_local_experts": 4},
    "llama-405b": {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128}
    | {"num_key_value_heads": 8, "intermediate_size": 53248},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 400},
    "deepseek_v3": SMALL | {"num_key_value_heads": 4, "kv_lora_rank": 16},
    "t5": {"d_model": 64, "num_layers": 2},
    "phi3-long": COMMON
    | {"num_key_value_heads": 4, "original_max_position_embeddings": 256, "max_position_embeddings": 4096}
    | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8}
       | {"long_factor": [2.0] * 8, "original_max_position_embeddings": 256}},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tokenizers, tmp_path_factory):
    """Folders with a config and a tokenizer each, by name."""
    root = tmp_path_factory.mktemp("pair")

    def make(name, tokenizer="bpe"):
        folder = root / f"{name}-{tokenizer}"
        if not folder.exists():
            kind = name.partition("-")[0]
            CONFIG_MAPPING[kind](**CONFIGS[name]).save_pretrained(folder)
            if tokenizer is not None:
                tokenizers[tokenizer].save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("source", "target", "works", "said"),
    [
        (("llama",), ("qwen3",), True, "The same: every token stands for itself"),
        (("llama",), ("qwen3", "unigram"), True, "They differ, and are aligned by characters"),
        (("llama",), ("llama", "wordpiece"), True, "fit with kind 'identity'"),
        (("llama", None), ("qwen3",), True, "Not compared"),
        (("mixtral",), ("gpt2",), True, "no rotary embedding"),
        (("llama-405b", None), ("llama",), True, "shows when its weights are there"),
        (("llama",), ("phi3-long",), True, "Contexts of more than 256 tokens are refused"),
        (("mamba",), ("llama",), False, "recurrent or compressed state"),
        (("llama",), ("deepseek_v3",), False, "multi-head latent attention"),
        (("gptj",), ("llama",), False, "GPTJForCausalLM rotates its keys"),
        (("t5",), ("llama",), False, "encoder-decoder"),
    ],
)
def test_pairs_of_configs(source, target, works, said, pair, run):
    result = run("doctor", pair(*source), pair(*target), "--json")
    assert result.exit_code == (0 if works else 1), result.output
    found = json.loads(result.stdout)
    assert found["works"] == works
    assert said in " ".join(finding["text"] for finding in found["findings"])
    assert "Traceback" not in result.stderr


def test_tokenizer_of_another_model(pair, run, tmp_path):
    CONFIG_MAPPING["llama"](**COMMON | {"vocab_size": 100}).save_pretrained(tmp_path)
    result = run("doctor", tmp_path, pair("llama"), "--source-tokenizer", pair("llama"))
    assert result.exit_code == 1
    assert "the model has 100 embeddings: they do not belong together" in result.stdout


def test_live_models_and_mapper(evaluated, models, files, run):
    folder, _ = evaluated
    result = run("doctor", files / "model", files / "model", folder)
    assert result.exit_code == 0, result.output
    assert "The default gate admits it, of these very models" in result.stdout
    assert result.stdout.splitlines()[-1] == "This mapper on this pair works."
    result = run("doctor", files / "model", files / "model", folder, "--config-only")
    assert result.exit_code == 0, result.output
    assert "on paper" in result.stdout


def test_mapper_of_another_pair(files, run, tmp_path, tokenizers):
    tiny_model("qwen3").save_pretrained(tmp_path / "other")
    tokenizers["unigram"].save_pretrained(tmp_path / "other")
    result = run("doctor", files / "model", tmp_path / "other", files / "mapper", "--config-only")
    assert result.exit_code == 1
    assert "It was fitted for a target of 4 layers of 2 KV heads x 16" in result.stdout
    assert "it has no evidence" in result.stdout
    assert "This mapper on this pair will not work." in result.stdout


def test_mapper_that_nobody_has_measured(files, run):
    result = run("doctor", files / "model", files / "model", files / "mapper", "--config-only")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "This pair works, but the gate refuses this mapper."


def test_nothing_there(run, files):
    result = run("doctor", "nowhere", files / "model")
    assert result.exit_code == 2
    assert "No config can be loaded from SOURCE 'nowhere'" in message(result)

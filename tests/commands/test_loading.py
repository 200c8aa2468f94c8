import json

import pytest
import torch

from ..tiny_models import COMMON


@pytest.fixture
def gguf_file(tmp_path):
    """A small random Llama as llama.cpp writes it, without a tokenizer."""
    gguf = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(0)
    hidden, middle, layers, vocabulary = (
        COMMON[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    shapes = {"token_embd": (vocabulary, hidden), "output": (vocabulary, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        for name, shape in {
            "attn_q": (hidden, hidden),
            "attn_output": (hidden, hidden),
            "attn_k": (32, hidden),
            "attn_v": (32, hidden),
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "ffn_gate": (middle, hidden),
            "ffn_up": (middle, hidden),
            "ffn_down": (hidden, middle),
        }.items():
            shapes[f"blk.{i}.{name}"] = shape
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocabulary)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_gguf_files_are_models(gguf_file, files, run):
    result = run("inspect", gguf_file, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["geometry"]["layers"] == [[2, 16, 16, None]] * 4
    result = run("doctor", gguf_file, files / "model", "--source-tokenizer", files / "model")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM caches 4 layers of 2 KV heads x 16" in result.stdout
    assert result.stdout.splitlines()[-1] == "This pair works."


def test_gguf_file_that_is_not_there(files, run, tmp_path):
    result = run("inspect", tmp_path / "nowhere.gguf")
    assert result.exit_code == 2
    assert "nowhere.gguf" in result.stderr.splitlines()[-1]

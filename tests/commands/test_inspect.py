import json

from hf_kvtransfer import KVMapper

from ..tiny_models import identity_mapper, tiny_model, with_native_layers


def test_mapper(evaluated, run):
    folder, _ = evaluated
    result = run("inspect", folder)
    assert result.exit_code == 0, result.output
    for part in ("tiny to tiny", "4 layers of 2 KV heads x 16", "█···", "···█", f"{folder}: admitted"):
        assert part in result.stdout
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert found["digest"] == KVMapper.from_pretrained(folder).digest()
    assert found["verdict"]["admitted"]


def test_mapper_with_native_layers(run, tmp_path):
    with_native_layers(identity_mapper(tiny_model("llama")), 1).quantize(8).save_pretrained(tmp_path)
    result = run("inspect", tmp_path)
    assert result.stdout.count(" native ") == 2
    assert "8-bit weights" in result.stdout
    assert "no evidence" in result.stdout
    assert result.exit_code == 0


def test_model_without_weights(run, tmp_path):
    tiny_model("gemma3").config.save_pretrained(tmp_path)
    result = run("inspect", tmp_path)
    assert result.exit_code == 0, result.output
    for part in ("Gemma3ForCausalLM", "theta 10000", "0 to 1", "last 32", "768 bytes for a token"):
        assert part in result.stdout
    found = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert len(found["geometry"]["layers"]) == 4


def test_what_is_neither(run, tmp_path):
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: No config can be loaded from NAME")

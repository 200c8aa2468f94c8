import pytest

from hf_kvtransfer import FidelityReport, KVMapper

from ..hub_server import HubServer, use_hub
from ..tiny_tokenizers import SENTENCES


def test_fit(run_example):
    output = run_example("fit.py", "{model}", "{model}", "{texts}", "my-mapper", "--budget", "1MB")
    mapper = KVMapper.from_pretrained("my-mapper")
    assert mapper.num_bytes() <= 1_000_000
    for layer_idx in mapper.config.mapped_layers:
        assert f"layer {layer_idx} reads {mapper.config.layers[layer_idx]['source_layers']}" in output


def test_evaluate_and_gate(run_example, pair, tmp_path, capsys):
    KVMapper.from_pretrained(pair / "mapper").save_pretrained(tmp_path / "my-mapper")
    with pytest.raises(SystemExit) as stopped:
        run_example(
            "evaluate_and_gate.py", "{model}", "{model}", "my-mapper", "prose={own}", "--need", "prose", "--limit", "3"
        )
    assert stopped.value.code == 0  # of a gate that is not strict
    output = capsys.readouterr().out
    figures = FidelityReport.load(tmp_path / "my-mapper").figures
    assert f"| {figures['arms']['translated']['loss']:.3f} |" in " ".join(output.split())
    assert "only 192 positions were scored, at least 384 are needed" in output


def test_cascade(run_example):
    arguments = ["--small", "{model}", "--large", "{model}", "--mapper", "{mapper}", "--new-tokens", "6"]
    output = run_example("cascade.py", SENTENCES[0], SENTENCES[4], *arguments, "--sure", "1.1")
    # Nobody is that sure, and the large model is handed what the small one has read of both questions.
    assert output.count("large: ") == 4
    assert output.count(" translated from small, ") == 2
    assert "small: 0 tokens kept, " in run_example("cascade.py", SENTENCES[0], *arguments, "--sure", "0")


def test_retrieval(run_example, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES[:4]), encoding="utf-8")
    arguments = ["--source", "{model}", "--target", "{model}", "--mapper", "{mapper}", "--text", "text.txt"]
    questions = [" ".join(SENTENCES[i].split()[-3:]) for i in (3, 1)]
    output = run_example("retrieval.py", *questions, *arguments, "--new-tokens", "4", "--passages", "1")
    assert output.count("tokens translated") == 2
    assert f"> {questions[0]}\npassages [3];" in output
    assert f"> {questions[1]}\npassages [1];" in output


def test_device_map(run_example):
    arguments = ("{model}", "{model}", "{mapper}", "{context}", "And then?", "--max-memory", "cpu=400KB")
    output = run_example("device_map.py", *arguments)
    assert "model.layers.3: disk" in output
    assert "tokens translated" in output
    assert output.endswith("keys are on {'cpu'}\n")


def test_four_bit_target(run_example):
    pytest.importorskip("bitsandbytes")
    output = run_example("four_bit_target.py", "{model}", "{model}", "{mapper}", "{context}", "And then?")
    assert "MB of weights" in output
    assert "tokens translated" in output


def test_hub_round_trip(run_example, monkeypatch, tmp_path):
    with HubServer() as server:
        use_hub(server, monkeypatch, tmp_path / "cache")
        output = run_example("hub_round_trip.py", "{mapper}", "me/source-to-target", "org/source", "org/target")
    assert f"pushed: {server.url}" in output
    assert "found: me/source-to-target: " in output
    assert "the same weights and evidence" in output
    assert "NOT" not in output

"""What the benchmarks count, and that they run."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from benchmarks import chunks, conversation, demo_pair, growth, memory, policy, roofline, speed
from benchmarks.counting import attended, map_weights, prefill_flops, translation_bytes, weight_bytes
from benchmarks.exponents import fit_growth
from benchmarks.random_pair import geometry_on_meta, map_specs, random_mapper, random_model
from hf_kvtransfer import KVGeometry
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.home import HOME_VARIABLE

from .tiny_models import identity_mapper, random_ids, tiny_model
from .tiny_tokenizers import SENTENCES, byte_level_bpe


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_operations_of_a_prefill(family):
    model = tiny_model(family, attn_implementation="eager")
    geometry, ids = KVGeometry.from_model(model), random_ids(model, 1, 50)
    with FlopCounterMode(display=False) as counter:
        read_into_cache(model, DynamicCache(config=model.config), ids)
    products = sum(counter.get_flop_counts()["Global"].values())
    assert prefill_flops(model, geometry, 50, skips_masked=False) == products
    on_meta = random_model(model.config, torch.float32, "meta")
    assert geometry_on_meta(on_meta) == geometry
    assert prefill_flops(on_meta, geometry, 50) == prefill_flops(model, geometry, 50) < products


def test_attended_pairs():
    for window in (None, 3, 7, 9):
        seen = sum(min(i + 1, window or 7) for i in range(7))
        assert attended(7, window) == seen
    assert attended(7, 3, skips_masked=False) == 49


def test_operations_and_bytes_of_a_translation():
    source, target = KVGeometry.from_model(tiny_model("llama")), KVGeometry.from_model(tiny_model("qwen3"))
    mapper = random_mapper(source, target, 64, 2, torch.float32, "cpu")
    maps = source, target, mapper.config.layers, 64
    matrices = [weight for weight in mapper.parameters() if weight.dim() > 1]
    assert map_weights(*maps) == sum(weight.numel() for weight in matrices)
    features = sum(weight.shape[1] for weight in matrices)
    outputs = sum(weight.shape[0] for weight in matrices)
    assert translation_bytes(*maps, 10, 4) == 4 * (map_weights(*maps) + 10 * (features + outputs))
    assert [spec.get("source_layers") for spec in map_specs(source, target, 2)] == [None, [1, 2], [1, 2], [2, 3]]


def test_bytes_of_weights():
    untied = tiny_model("llama")
    table = untied.get_input_embeddings().weight.numel()
    assert weight_bytes(untied, 2) == 2 * (untied.num_parameters() - table)
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert weight_bytes(tied, 2) == 2 * tied.num_parameters()


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.4])
def test_an_exponent_is_found_in_noise(exponent):
    generator = np.random.default_rng(0)
    tokens = np.repeat([128, 256, 512, 1024, 2048, 4096, 8192], 3)
    noise = np.exp(0.03 * generator.standard_normal(len(tokens)))
    values = (1e-4 * tokens**exponent + (0.02 if exponent else 0.0)) * noise
    growth = fit_growth(tokens, values, has_fixed=exponent > 0)
    assert growth.low - 0.01 <= exponent <= growth.high + 0.01
    assert growth.high - growth.low < 0.3
    with pytest.raises(ValueError, match="three lengths or more"):
        fit_growth([1, 1, 2], [1.0, 1.0, 2.0])


def test_rooflines():
    source, target = roofline.PAIRS["14B-to-32B"]
    shapes = roofline.Shapes.of(source, target)
    short, long = (roofline.count_work(shapes, length, 4) for length in (1024, 32768))
    weights, features = 32.0e9 - 152064 * 5120 * 2, 4 * 2048 + 5120
    assert short.prefill_flops == pytest.approx(2 * weights * 1024, rel=0.05)
    assert short.mapper_bytes == 2 * 63 * features * 2048
    assert long.translation_flops == 32 * short.translation_flops
    assert long.prefill_flops > 32 * short.prefill_flops
    assert long.target_bytes == 64 * 2048 * 2 * 32768
    times = {name: long.seconds(*rates) for name, rates in roofline.GPUS.items()}
    assert times["A100 80GB"]["prefill"] > times["H100 SXM"]["prefill"] == times["H200 SXM"]["prefill"]
    assert times["H200 SXM"]["ratio"] > short.seconds(*roofline.GPUS["H200 SXM"])["ratio"]


@pytest.fixture
def configs(tmp_path):
    for name, family in (("source", "llama"), ("target", "qwen3")):
        tiny_model(family).config.save_pretrained(tmp_path / name)
    return ["--source-config", str(tmp_path / "source"), "--target-config", str(tmp_path / "target")]


def test_growth_is_measured_and_drawn(configs, tmp_path):
    lengths = ["--lengths", "32", "64", "96", "--fit-tokens", "1536", "--runs", "1", "--threads", "1"]
    growth.main([str(tmp_path / "growth"), *configs, *lengths])
    results = json.loads((tmp_path / "growth.json").read_text())
    assert set(results["exponents"]) == {"prefill", "bind", "translation", "handoff", "temporary layers"}
    assert [tokens for tokens, _ in results["measured"]["handoff"]] == [32, 64, 96]
    assert [tokens for tokens, _ in results["measured"]["fit"]] == [1536]
    pytest.importorskip("matplotlib")
    growth.draw(results["measured"], results["exponents"], tmp_path / "growth.svg")
    assert "tokens" in (tmp_path / "growth.svg").read_text()


@pytest.fixture
def demo_mapper(tmp_path, monkeypatch):
    """Tiny models in place of the demo's, and the folder of a mapper between them."""
    models = tiny_model("llama"), tiny_model("gemma3", seed=1)
    geometries = [KVGeometry.from_model(model) for model in models]
    random_mapper(*geometries, 64, 2, torch.float32, "cpu").save_pretrained(tmp_path / "mapper")
    tokenizer = byte_level_bpe()
    monkeypatch.setattr(demo_pair, "load_demo_model", lambda name, dtype: (models["gemma" in name], tokenizer))
    monkeypatch.setattr(demo_pair, "TEXT_FILES", ("LICENSE",))
    return str(tmp_path / "mapper")


def test_growth_of_the_demo_pair_is_measured_on_text(demo_mapper, tmp_path):
    lengths = ["--lengths", "48", "--fit-tokens", "1536", "--runs", "1", "--threads", "1"]
    growth.main([str(tmp_path / "growth"), "--mapper", demo_mapper, *lengths])
    results = json.loads((tmp_path / "growth.json").read_text())
    assert {name: len(measured) for name, measured in results["measured"].items()} == dict.fromkeys(
        ("fit", "fit memory", "prefill", "bind", "translation", "handoff", "temporary layers"), 1
    )
    assert results["exponents"] == {}


@pytest.mark.parametrize(
    ("script", "options", "columns"),
    [
        (memory, [], {"cache", "layer", "temporary", "with_probe"}),
        (policy, ["--runs", "1"], {"prefill", "handoff", "predicted_ratio", "choice", "loss"}),
        (speed, ["--runs", "1", "--steps", "2"], {"ratio", "ratio_with_probe", "product_share", "decode"}),
    ],
    ids=["memory", "policy", "speed"],
)
def test_measurements_of_the_demo_pair(demo_mapper, tmp_path, capsys, monkeypatch, script, options, columns):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    file = tmp_path / "found.json"
    script.main(["--mapper", demo_mapper, "--lengths", "40", "--threads", "1", "--json", str(file), *options])
    found = json.loads(file.read_text())
    (row,) = found.values() if isinstance(found, dict) else found
    assert columns <= set(row)
    assert "     40" in capsys.readouterr().out


def test_a_geometry_runs_with_random_weights_and_fewer_layers(configs, tmp_path):
    file = tmp_path / "roofline.json"
    roofline.main(
        ["--measure", "configs", *configs, "--layers", "2", "--lengths", "40", "--num-source-layers", "2"]
        + ["--dtype", "float32", "--device", "cpu", "--runs", "1", "--json", str(file)]
    )
    found = json.loads(file.read_text())["2 source layers"]
    assert found["scale"] == 2
    (measured,) = found["lengths"].values()
    assert measured["scaled"]["prefill"] == 2 * measured["seconds"]["prefill"]
    assert set(measured["share_of_bound"]) == {"prefill", "translation"}


def test_turns_of_a_dialogue():
    messages = [{"role": role, "content": f"{role} {i} "} for i, role in enumerate("AuAAutuA")]
    roles = {"A": "assistant", "u": "user", "t": "tool"}
    messages = [message | {"role": roles[message["role"]]} for message in messages]
    found = [([m["content"] for m in before], reply) for before, reply in conversation.turns(messages)]
    # What the assistant says first replies to nothing, and what it says twice in a row is one reply.
    assert found == [(["u 1 "], "A 2\n\nA 3"), (["u 4 ", "t 5 ", "u 6 "], "A 7")]


def test_the_slope_of_a_difference_over_turns():
    def row(dialogue, turn, gap, positions):
        losses = {"native_loss": positions * 2.0, "translated_loss": positions * (2.0 + gap)}
        return {"dialogue": dialogue, "turn": turn, "positions": positions} | losses

    rows = [row(d, turn, 0.1 * turn, 5 + turn + d) for d in range(3) for turn in range(2, 6)]
    rows += [row(d, 1, 9.0, 10) for d in range(3)]  # the first turn has nothing to translate
    assert conversation.slope(rows) == pytest.approx(0.1)
    assert conversation.interval(rows) == pytest.approx([0.1, 0.1])
    assert conversation.interval(rows[:4]) is None


def test_the_conversation_benchmark(tokenizers, tmp_path, monkeypatch, capsys):
    """With the identity between a model and itself nothing is lost, and every token is accounted for."""
    model = tiny_model("llama", max_position_embeddings=2048)
    monkeypatch.setattr(conversation, "load_demo_model", lambda name: (model, tokenizers["bpe"]))
    identity_mapper(model).save_pretrained(tmp_path / "mapper")
    contents = [*SENTENCES[:3], *SENTENCES[3:], *SENTENCES[:3]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    (tmp_path / "dialogues.jsonl").write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    arguments = ["dialogues.jsonl", "--turns", "4", "--mapper", "mapper", "--back", "mapper", "--json", "out.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["conversation.py", *arguments])
    conversation.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4]
    assert all(row["translated_loss"] == pytest.approx(row["native_loss"], abs=0.01) for row in rows)
    assert all(row["translated"] > 0 for row in rows[1:])
    output = capsys.readouterr().out
    for name in conversation.NAMES:
        translated = sum(row["translated"] for row in rows if row["model"] == name)
        assert f"{translated} not read by itself, {translated} translated; 0 cut off again" in output


def test_chunks_are_scored_and_drawn(tmp_path, monkeypatch):
    model, tokenizer = tiny_model("llama"), byte_level_bpe()
    monkeypatch.setattr(chunks, "load_demo_model", lambda name: (model, tokenizer))
    text = " ".join([SENTENCES[0], SENTENCES[4]] * 4)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    # One chunk is where it was read, so that all methods are exact, and facts of two need more than one.
    output, efforts = str(tmp_path / "one"), ["--efforts", "0.15", "0.5"]
    chunks.main(
        [str(tmp_path / "data.jsonl"), output, "--kinds", "one source", "--chunks", "1", "--length", "80", *efforts]
    )
    (row,) = json.loads((tmp_path / "one.json").read_text())["rows"]
    for name in (
        "old positions",
        "new positions",
        "first 8 read again",
        "15% read again",
        "15% read again, by deviation",
    ):
        assert row["losses"][name] == pytest.approx(row["losses"]["full prefill"], abs=1e-3)
    output = str(tmp_path / "some")
    chunks.main([str(tmp_path / "data.jsonl"), output, "--chunks", "2", "--length", "40", *efforts])
    results = json.loads((tmp_path / "some.json").read_text())
    assert [row["kind"] for row in results["rows"]] == list(results["figures"]) == list(chunks.KINDS)
    for methods in results["figures"].values():
        saved = [methods[f"{share}% read again"]["operations_saved"] for share in (15, 50)]
        assert 1 > saved[0] > saved[1]
        # The question is read once more, to see what it attends to.
        assert methods["15% read again, by deviation"]["operations_saved"] > saved[0]
        assert methods["full prefill"]["operations_saved"] == 0
        assert methods["new positions"]["remaining_recovered"]["value"] == 0
    # What is there is not asked again.
    monkeypatch.setattr(chunks, "ask", None)
    chunks.main([str(tmp_path / "data.jsonl"), output, "--chunks", "2", "--length", "40", *efforts])
    pytest.importorskip("matplotlib")
    assert "% of tokens read again" in (tmp_path / "some.svg").read_text()

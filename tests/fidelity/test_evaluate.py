"""From data to a report: what is in it, and how an evaluation goes on after an interruption."""

import copy
import dataclasses
import json
import logging
import math

import pytest
import tokenizers as tokenizers_package
import torch
import transformers

import hf_kvtransfer
from hf_kvtransfer import (
    AlignmentError,
    EvaluationDataError,
    FidelityReport,
    KVGeometry,
    KVMapper,
    KVMapperConfig,
    ModelIdentity,
    PairMismatchError,
    RefusedError,
    SourceKV,
)
from hf_kvtransfer.compat import cache_argument, read_into_cache, token_losses
from hf_kvtransfer.fidelity.arms import ARMS
from hf_kvtransfer.fidelity.corruptions import CORRUPTIONS
from hf_kvtransfer.fidelity.evaluate import evaluate_mapper
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.tail_reading import MAX_PROBE_TOKENS
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint

from ..tiny_models import identity_mapper, plant, random_ids, tiny_model, ungated_cache, with_native_layers
from ..tiny_tokenizers import SENTENCES
from .written_out import log_probs, loss, planted_mapper


CONTEXT, CONTINUATION = 24, 8
SHORT = {"context_tokens": CONTEXT, "continuation_tokens": CONTINUATION}


@pytest.fixture(scope="module")
def pair():
    source = tiny_model("llama")
    target = plant(source)
    return planted_mapper(source, target), source, target


@pytest.fixture(scope="module")
def rows(pair):
    return random_ids(pair[1], 6, CONTEXT + CONTINUATION, seed=3).tolist()


@pytest.fixture(scope="module")
def report(pair, rows):
    return evaluate_mapper(*pair, rows, **SHORT)


def as_json(report):
    names = {field.name for field in dataclasses.fields(report)} - {"created", "results"}
    entries = {name: getattr(report, name) for name in names}
    return json.dumps([entries, [row.to_dict() for row in report.results]], sort_keys=True)


# transformers#36536, transformers#27040, ggml-org/llama.cpp#7859
def test_the_figures_are_those_of_the_arms(pair, rows, report):
    _, _, target = pair
    assert set(report.figures["arms"]) == set(ARMS)
    assert report.figures["positions"] == len(rows) * CONTINUATION
    assert report.figures["documents"] == len(rows)
    assert not report.figures["sufficient"]
    contexts, continuations = [row[:CONTEXT] for row in rows], [row[CONTEXT:] for row in rows]
    # The donor of a document is the next one, of the last the first.
    donors = contexts[1:] + contexts[:1]
    reads = {
        "native": contexts,
        "translated": contexts,
        "other_document": [d[:-1] + c[-1:] for d, c in zip(donors, contexts, strict=True)],
        "no_context": [c[:4] + c[-1:] for c in contexts],
    }
    for arm, read in reads.items():
        losses = [loss(log_probs(target, r, c), c) for r, c in zip(read, continuations, strict=True)]
        assert [row.arms[arm].loss for row in report.results] == pytest.approx(losses, abs=1e-3)
        assert report.figures["arms"][arm]["loss"] == pytest.approx(sum(losses) / len(rows) / CONTINUATION, abs=1e-4)
    assert report.figures["arms"]["translated"]["agreement"] == 1


def test_the_report_says_what_was_measured(pair, rows, report, tmp_path):
    mapper, source, target = pair
    assert report.mapper == {"name": "tiny -> tiny", "digest": mapper.digest(), "native_layers": None}
    for side, model in (("source", source), ("target", target)):
        found = ModelIdentity.from_dict(getattr(report, side)["identity"])
        assert ModelIdentity.from_model(model).differences(found) == []
        assert getattr(report, side)["cache_policy"]["full_layers"] == 4
    (data,) = report.data
    assert (data["documents"], data["skipped"]) == (6, {})
    settings = {"context_tokens": 24, "continuation_tokens": 8, "sink_tokens": 4, "tail_tokens": 1, "seed": 0}
    assert settings.items() <= report.settings.items()
    assert (report.settings["source_dtype"], report.settings["target_dtype"]) == ("float32", "float32")
    assert report.versions["hf_kvtransfer"] == hf_kvtransfer.__version__
    for package in (transformers, torch, tokenizers_package):
        # A local version (as of a CPU build of torch) may be part of either.
        assert report.versions[package.__name__].split("+")[0] == str(package.__version__).split("+")[0]
    assert report.probe is None  # the contexts are too short to be probed
    assert as_json(FidelityReport.load(report.save(tmp_path))) == as_json(report)


def test_arguments_reach_the_measurement(pair, rows):
    settings = SHORT | {"continuation_tokens": 5, "limit": 3, "sink_tokens": 2, "tail_tokens": 4, "seed": 1}
    report = evaluate_mapper(*pair, rows, **settings)
    assert report.figures["positions"] == 3 * 5
    assert settings.items() <= report.settings.items()
    (first, *_), target = report.results, pair[2]
    read, continuation = rows[0][:2] + rows[0][CONTEXT - 4 : CONTEXT], rows[0][CONTEXT : CONTEXT + 5]
    assert first.arms["no_context"].loss == pytest.approx(loss(log_probs(target, read, continuation), continuation))


@pytest.fixture(scope="module")
def noisy(pair):
    """The pair with a mapper that is a little wrong."""
    mapper, source, target = pair
    mapper, generator = copy.deepcopy(mapper), torch.Generator().manual_seed(0)
    for layer in mapper.layers:
        layer.weight.data += 0.03 * torch.randn(layer.weight.shape, generator=generator)
    return mapper, source, target


def test_efforts_are_arms_of_their_own(noisy, rows, tmp_path, monkeypatch):
    mapper, source, target = noisy
    plain = evaluate_mapper(*noisy, rows, **SHORT)
    assert "efforts" not in plain.settings
    given = SHORT | {"efforts": (1, 0.25), "work_file": tmp_path / "work.jsonl"}
    with monkeypatch.context() as patch:
        Interrupted(patch, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            evaluate_mapper(*noisy, rows, **given)
    report = evaluate_mapper(*noisy, rows, **given)
    assert report.settings["efforts"] == [0.25, 1.0]
    assert list(report.figures["arms"])[:4] == ["native", "translated", "effort 0.25", "effort 1.0"]
    for row, other in zip(report.results, plain.results, strict=True):
        assert {arm: row.arms[arm] for arm in ARMS} == other.arms
    losses = {arm: figures["loss"] for arm, figures in report.figures["arms"].items()}
    assert losses["effort 1.0"] == pytest.approx(losses["native"], abs=1e-4) != losses["translated"]
    assert abs(losses["effort 0.25"] - losses["native"]) < abs(losses["translated"] - losses["native"])
    # What a cache with this effort gives.
    for row, result in zip(rows, report.results, strict=True):
        ids = torch.tensor([row])
        source_kv = SourceKV.prefill(source, None, ids[:, :CONTEXT])
        cache = ungated_cache(source_kv, mapper, target, input_ids=ids[:, :CONTEXT], effort=0.25)
        logits = read_into_cache(target, cache, ids[:, CONTEXT - 1 : -1], num_logits=CONTINUATION)
        expected = float(token_losses(logits, ids[:, CONTEXT:]).sum())
        assert result.arms["effort 0.25"].loss == pytest.approx(expected, abs=1e-4)
    assert as_json(FidelityReport.load(report.save(tmp_path))) == as_json(report)
    with pytest.raises(EvaluationDataError, match="settings.efforts was .* and is None"):
        evaluate_mapper(*noisy, rows, **given | {"efforts": ()})


@pytest.mark.parametrize(
    ("efforts", "reason"),
    [((0.1, 0.1), "must be different ones"), ((0.0,), "holds 0"), ((1.2,), "`effort` must be between 0")],
)
def test_efforts_that_cannot_be_measured(pair, rows, efforts, reason):
    with pytest.raises(ValueError, match=reason):
        evaluate_mapper(*pair, rows, **SHORT, efforts=efforts)


class Interrupted:
    """Counts the documents that are scored, and stops before one of them."""

    def __init__(self, monkeypatch, stop_at=None):
        self.scored = 0
        score = Replay.score

        def counted(replay, *args, **kwargs):
            if self.scored == stop_at:
                raise KeyboardInterrupt
            self.scored += 1
            return score(replay, *args, **kwargs)

        monkeypatch.setattr(Replay, "score", counted)


@pytest.mark.parametrize("half_written", [b"", b'{"document": "iterable:4", "resul', b'{"document": "iterable:4"}'])
def test_an_interrupted_evaluation_goes_on(pair, rows, report, tmp_path, monkeypatch, half_written):
    work_file = tmp_path / "folder" / "work.jsonl"
    with monkeypatch.context() as patch:
        interrupted = Interrupted(patch, stop_at=3)
        with pytest.raises(KeyboardInterrupt):
            evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    assert interrupted.scored == 3
    finished = work_file.read_bytes()
    assert finished.count(b"\n") == 4
    work_file.write_bytes(finished + half_written)
    with monkeypatch.context() as patch:
        rest = Interrupted(patch)
        resumed = evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    assert rest.scored == 3
    assert as_json(resumed) == as_json(report)
    assert work_file.read_bytes().startswith(finished)
    with monkeypatch.context() as patch:
        nothing = Interrupted(patch)
        again = evaluate_mapper(*pair, rows, **SHORT, work_file=str(work_file))
    assert nothing.scored == 0
    assert as_json(again) == as_json(report)


@pytest.mark.parametrize("written", [b"", b'{"source": {"ident'])
def test_an_interruption_before_the_header_was_written(pair, rows, report, tmp_path, written):
    work_file = tmp_path / "work.jsonl"
    work_file.write_bytes(written)
    assert as_json(evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)) == as_json(report)


@pytest.mark.parametrize("text", [b"notes of mine", b" ", b'{"source": {"identity": {"format": 99'])
def test_a_file_that_is_no_work_file_is_left_alone(pair, rows, tmp_path, text):
    work_file = tmp_path / "notes.txt"
    work_file.write_bytes(text)
    with pytest.raises(EvaluationDataError, match="notes.txt is not the work file of this evaluation.*another path"):
        evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    assert work_file.read_bytes() == text


def test_a_work_file_of_another_evaluation_is_refused(pair, rows, tmp_path):
    work_file = tmp_path / "work.jsonl"
    evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    before = work_file.read_bytes()
    with pytest.raises(EvaluationDataError, match="settings.seed was 0 and is 1. Go on with"):
        evaluate_mapper(*pair, rows, **SHORT, work_file=work_file, seed=1)
    with pytest.raises(EvaluationDataError, match="data was .*documents was "):
        evaluate_mapper(*pair, rows[:-1], **SHORT, work_file=work_file)
    mapper, source, target = pair
    other = copy.deepcopy(mapper)
    other.layers[0].bias.data += 1
    with pytest.raises(EvaluationDataError, match="mapper was"):
        evaluate_mapper(other, source, target, rows, **SHORT, work_file=work_file)
    changed = copy.deepcopy(target)
    changed.model.layers[0].mlp.up_proj.weight.data *= 2
    with pytest.raises(EvaluationDataError, match="target.identity"):
        evaluate_mapper(mapper, source, changed, rows, **SHORT, work_file=work_file)
    assert work_file.read_bytes() == before


@pytest.mark.parametrize("line", [0, 2])
def test_a_damaged_work_file_is_refused(pair, rows, tmp_path, line):
    work_file = tmp_path / "work.jsonl"
    evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    lines = work_file.read_bytes().split(b"\n")
    lines[line] = lines[line][:-9]
    work_file.write_bytes(b"\n".join(lines))
    with pytest.raises(EvaluationDataError, match=f"Line {line + 1} of the work file .* is damaged"):
        evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)


@pytest.fixture(scope="module")
def long_rows(pair):
    return random_ids(pair[1], 8, 88, seed=4).tolist()


LONG = {"context_tokens": 80, "continuation_tokens": 8, "false_alarm_rate": 0.25}


def test_the_probe_is_calibrated_on_right_and_corrupted_translations(pair, long_rows, tmp_path, monkeypatch):
    report = evaluate_mapper(*pair, long_rows, **LONG, corrupted_documents=2)
    assert report.probe["documents"] == 8
    assert report.probe["false_alarm_rate"] == 0.25
    assert all(set(point["caught"]) == set(CORRUPTIONS) for point in report.probe["curve"])
    assert report.save(tmp_path).is_file()
    with monkeypatch.context() as patch:
        Interrupted(patch, stop_at=4)
        with pytest.raises(KeyboardInterrupt):
            evaluate_mapper(*pair, long_rows, **LONG, corrupted_documents=2, work_file=tmp_path / "work.jsonl")
    resumed = evaluate_mapper(*pair, long_rows, **LONG, corrupted_documents=2, work_file=tmp_path / "work.jsonl")
    assert as_json(resumed) == as_json(report)


def test_the_probe_reads_as_many_documents_as_asked_for(pair, long_rows, tmp_path):
    work_file = tmp_path / "work.jsonl"
    evaluate_mapper(*pair, long_rows[:6], **LONG, probe_documents=3, corrupted_documents=1, work_file=work_file)
    _, *records = map(json.loads, work_file.read_text().splitlines())
    # Spread over all of the data.
    assert [record["right"] is not None for record in records] == [True, False] * 3
    assert [bool(record["wrong"]) for record in records] == [True] + [False] * 5
    assert all(len(reading["losses"]) == MAX_PROBE_TOKENS for reading in records[0]["wrong"].values())


@pytest.mark.parametrize("shared", [CONTEXT // 4, CONTEXT // 4 + 1])
def test_a_stand_in_does_not_begin_as_the_document_does(pair, rows, shared):
    _, _, target = pair
    first, second, third = rows[:3]
    second = first[:shared] + second[shared:]

    def other_document(*rows):
        return evaluate_mapper(*pair, rows, **SHORT).results[0].arms["other_document"].loss

    def expected(donor):
        read = donor[: CONTEXT - 1] + first[CONTEXT - 1 : CONTEXT]
        return pytest.approx(loss(log_probs(target, read, first[CONTEXT:]), first[CONTEXT:]), abs=1e-3)

    assert other_document(first, second, third) == expected(second if shared == CONTEXT // 4 else third)
    # Better than none.
    assert other_document(first, second) == expected(second)


def test_documents_that_do_not_align_are_left_out(pair, rows, report, tmp_path, monkeypatch, caplog):
    translate = Replay.translate

    def failing(replay, passage, source_kv):
        if passage.target_ids in bad:
            raise AlignmentError("no text in common")
        return translate(replay, passage, source_kv)

    monkeypatch.setattr(Replay, "translate", failing)
    bad = [rows[0][:CONTEXT], rows[3][:CONTEXT]]
    work_file = tmp_path / "work.jsonl"
    with caplog.at_level(logging.WARNING):
        found = evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    assert "2 of 6 documents were left out" in caplog.text
    assert "iterable:1, because of AlignmentError." in caplog.text
    # An error may quote the data, which is none of the work file's business.
    assert "no text in common" not in caplog.text + work_file.read_text()
    name = "hf_kvtransfer.fidelity.document_replay"
    assert f"logger {name} at level DEBUG" in caplog.text
    assert [row.document for row in found.results] == [f"iterable:{i}" for i in (2, 3, 5, 6)]
    assert found.data[0]["documents"] == found.figures["documents"] == 4
    assert found.data[0]["skipped"] == {"texts of the two sides do not align": 2}
    kept = {row.document: row for row in report.results}
    for row in found.results:
        assert row.arms["translated"] == kept[row.document].arms["translated"]
        # Nor is a document that does not align a donor: the third's is the fifth, the last one's the second.
        same_donor = row.document not in ("iterable:3", "iterable:6")
        assert (row.arms["other_document"] == kept[row.document].arms["other_document"]) is same_donor
    bad = [row[:CONTEXT] for row in rows]
    with (
        caplog.at_level(logging.DEBUG, logger=name),
        pytest.raises(EvaluationDataError, match=f"None of the 6 documents .*because of AlignmentError.*{name}"),
    ):
        evaluate_mapper(*pair, rows, **SHORT)
    assert "Document 'iterable:1' is left out: no text in common" in caplog.text
    bad = bad[1:]
    with pytest.raises(EvaluationDataError, match="No other document can be translated, to stand in for 'iterable:1'"):
        evaluate_mapper(*pair, rows, **SHORT)


def test_other_errors_are_not_swallowed(pair, rows, tmp_path, monkeypatch):
    score = Replay.score

    def failing(replay, passage, *args, **kwargs):
        if passage.target_ids == rows[2][:CONTEXT]:
            raise RuntimeError("out of memory")
        return score(replay, passage, *args, **kwargs)

    monkeypatch.setattr(Replay, "score", failing)
    work_file = tmp_path / "work.jsonl"
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        evaluate_mapper(*pair, rows, **SHORT, work_file=work_file)
    assert "iterable:3" in raised.value.__notes__[0]
    assert len(work_file.read_text().splitlines()) == 3


def test_what_cannot_be_evaluated(pair, rows, tmp_path):
    mapper, source, target = pair
    work_file = tmp_path / "work.jsonl"
    with pytest.raises(PairMismatchError, match="for a source of"):
        evaluate_mapper(mapper, tiny_model("qwen3"), target, rows, **SHORT, work_file=work_file)
    assert not work_file.exists()
    with pytest.raises(EvaluationDataError, match="`data` gives 1 document"):
        evaluate_mapper(*pair, rows[:1], **SHORT)
    with pytest.raises(EvaluationDataError, match="No other document can be translated"):
        evaluate_mapper(*pair, rows[:1] * 2, **SHORT)
    for rate in (0, -0.1, 0.51, 1, math.nan):
        with pytest.raises(ValueError, match=f"`false_alarm_rate` must be above 0 and at most 0.5, got {rate}"):
            evaluate_mapper(*pair, rows, **SHORT, false_alarm_rate=rate)
    for name in ("sink_tokens", "probe_documents", "corrupted_documents"):
        with pytest.raises(ValueError, match=f"`{name}` must be 0 or more, got -1"):
            evaluate_mapper(*pair, rows, **SHORT, **{name: -1})
    with pytest.raises(ValueError, match=r"`target` is in training mode.*target.eval\(\)"):
        evaluate_mapper(mapper, source, copy.deepcopy(target).train(), rows, **SHORT)


@pytest.mark.parametrize("place", [0, CONTEXT])
def test_ids_beyond_the_vocabulary_are_refused_before_anything_is_read(pair, rows, tmp_path, monkeypatch, place):
    """In a context both models read them, in a continuation the target."""
    work_file = tmp_path / "work.jsonl"
    counted = Interrupted(monkeypatch)
    bad = [*rows[3]]
    bad[place] = 400
    side = "target" if place else "source"
    with pytest.raises(
        EvaluationDataError,
        match=rf"'iterable:4' has the token id 400, but the {side} .* has 400 embeddings.*0 to 399",
    ):
        evaluate_mapper(*pair, [*rows[:3], bad], **SHORT, work_file=work_file)
    assert counted.scored == 0 and not work_file.exists()
    bad[place] = 399
    evaluate_mapper(*pair, [*rows[:1], bad], **SHORT)


def test_text_dialogues_and_choices_with_two_tokenizers(tokenizers, monkeypatch):
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    sides = [
        {"name": name, "geometry": KVGeometry.from_model(m).to_dict(), "tokenizer": tokenizer_fingerprint(tokenizer)}
        for name, m, tokenizer in (("a", source, tokenizers["bpe"]), ("b", target, tokenizers["unigram"]))
    ]
    layers = [{"kind": "linear", "source_layers": [i]} for i in range(4)]
    mapper = KVMapper(KVMapperConfig(source=sides[0], target=sides[1], layers=layers, token_features=64)).eval()
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    question, *_, answer = SENTENCES[-1].partition("\n\n")
    dialogue = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "What do the farmers wait for?"},
        {"role": "assistant", "content": "The flood."},
    ]
    data = {
        "prose": [{"text": SENTENCES[0] * 2}, {"text": f"The mountains. {SENTENCES[0]} {SENTENCES[-1]}"}],
        "dialogue": [{"messages": dialogue}],
        "choice": [
            {"context": SENTENCES[0], "endings": ["Fish.", "The river carries silt.", "Water"], "label": 1},
            {"context": SENTENCES[2], "endings": ["Viktor", "Zwölf"], "label": 0},
        ],
    }
    read = []
    prefill = SourceKV.prefill

    def counted(model, tokenizer, text, **options):
        read.append(text)
        return prefill(model, tokenizer, text, **options)

    monkeypatch.setattr(SourceKV, "prefill", counted)
    names = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": tokenizers["unigram"]}
    report = evaluate_mapper(mapper, source, target, data, **SHORT, **names)
    assert report.source["identity"]["tokenizer"] == tokenizer_fingerprint(tokenizers["bpe"])
    assert {row.capability for row in report.results} == set(report.figures["capabilities"]) == set(data)
    assert [(row.turn, row.choices, row.label) for row in report.results] == [
        (None, None, None),
        (None, None, None),
        (1, None, None),
        (2, None, None),
        (None, 3, 1),
        (None, 2, 0),
    ]
    assert [turn["turn"] for turn in report.figures["turns"]] == [1, 2]
    assert report.figures["choices"]["choice"]["items"] == 2
    # Each document once, a dialogue up to its last reply; and the first again, as the donor of the last.
    assert len(read) == 6
    assert read[0] == read[5]
    assert read[2].startswith(f"User: {question}") and read[2].endswith("wait for?\n\nAssistant:")


def test_no_model_and_no_mapper_is_changed(pair, rows):
    before = [copy.deepcopy(module.state_dict()) for module in pair]
    evaluate_mapper(*pair, rows[:2], **SHORT)
    for module, state in zip(pair, before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


def test_a_target_with_sliding_windows():
    """Contexts beyond the window, in every arm."""
    model = tiny_model("gemma3")
    report = evaluate_mapper(
        identity_mapper(model),
        model,
        model,
        random_ids(model, 3, 60).tolist(),
        context_tokens=50,
        continuation_tokens=10,
    )
    arms = report.figures["arms"]
    assert arms["translated"]["loss"] == pytest.approx(arms["native"]["loss"], abs=1e-5)
    assert arms["translated"]["worst_layer"]["cosine"] == pytest.approx(1, abs=1e-5)
    assert report.target["cache_policy"]["sliding_window"] == [32]


@pytest.fixture(scope="module")
def behind_native_layers(pair, long_rows):
    """A quantised mapper behind the target's first two layers, with its evidence."""
    mapper, source, target = pair
    mapper = with_native_layers(mapper, 1).quantize(8)
    mapper.evidence = evaluate_mapper(mapper, source, target, long_rows, **LONG, corrupted_documents=2)
    return mapper, source, target


def test_native_layers_and_quantised_weights(behind_native_layers, tmp_path):
    mapper, *_ = behind_native_layers
    report = mapper.evidence
    assert report.mapper == {"name": "tiny -> tiny", "digest": mapper.digest(), "native_layers": 1}
    arms = report.figures["arms"]
    assert set(arms) == set(ARMS)
    # But for rounding to 8 bits, which the planted change of basis magnifies.
    assert arms["translated"]["loss"] == pytest.approx(arms["native"]["loss"], abs=0.05)
    assert arms["random_map"]["kl"] > 10 * arms["translated"]["kl"]
    # Only layers that are mapped can be off.
    assert {len(band["error_means"]) for band in report.probe["bands"].values()} == {4}
    assert all(set(point["caught"]) == set(CORRUPTIONS) for point in report.probe["curve"])
    mapper.save_pretrained(tmp_path)
    loaded = KVMapper.from_pretrained(tmp_path)
    assert as_json(loaded.evidence) == as_json(report)
    assert loaded.digest() == report.mapper["digest"]


def test_a_request_is_probed_behind_native_layers(behind_native_layers, long_rows):
    mapper, source, target = behind_native_layers
    context = torch.tensor([long_rows[0][:80]])
    cache = ungated_cache(SourceKV.prefill(source, None, context), mapper, target)
    report = cache.report
    assert (report.outcome, report.native_layers) == ("translated", 1)
    assert not any("another mapper" in reason for reason in report.verdict.reasons)
    assert report.probe.passed
    with torch.no_grad():
        native = target(context).logits[0, -1]
        found = target(context[:, -1:], **{cache_argument(target): cache}).logits[0, -1]
    assert torch.cosine_similarity(found, native, dim=0) > 0.95
    wrong = SourceKV.prefill(source, None, torch.tensor([long_rows[1][:80]]))
    wrong.input_ids = context
    with pytest.raises(RefusedError, match="does not stand for this context"):
        ungated_cache(wrong, mapper, target)

"""`ShadowTransfer`: what is served is native, what is logged is true, and nothing is remembered for ever."""

import copy
import json
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F
from transformers import TextIteratorStreamer

from hf_kvtransfer import EvidenceError, PairMismatchError, TokenizerMismatchError
from hf_kvtransfer.fidelity import shadow as shadow_module
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.shadow import ShadowTransfer
from hf_kvtransfer.fidelity.shadow_log import ShadowLog, summarize_shadow_log
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint

from ..tiny_models import identity_mapper, random_ids, tiny_model


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def mapper(model):
    return identity_mapper(model)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "shadow.jsonl"


@pytest.fixture
def make(model, mapper, log):
    def make(**options):
        return ShadowTransfer(mapper, model, model, **{"log": log, "rate": 1.0} | options)

    return make


def prompt(model, *shape, seed=0):
    ids = random_ids(model, *(shape or (1, 40)), seed=seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def mean_loss(line, arm):
    return line["arms"][arm]["loss"] / line["arms"][arm]["positions"]


SAMPLING = {"do_sample": True, "max_new_tokens": 6}


@pytest.mark.parametrize(
    "options",
    [
        SAMPLING,
        SAMPLING | {"num_return_sequences": 2},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6},
    ],
)
def test_serves_what_the_target_serves(model, make, options):
    inputs = prompt(model, 2, 30)
    torch.manual_seed(7)
    native = [model.generate(**inputs, **options) for _ in range(3)]
    state = torch.get_rng_state()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    torch.manual_seed(7)
    with make() as shadow:
        for expected in native:
            assert torch.equal(shadow.generate(inputs, conversation="a", **options), expected)
            assert shadow.drain() == 2
        assert torch.equal(torch.get_rng_state(), state)
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert not model.training


def test_comparing_draws_nothing_from_the_generator_that_sampling_uses(model, make, monkeypatch):
    score = Replay.score
    monkeypatch.setattr(Replay, "score", lambda self, *args, **named: (torch.rand(3), score(self, *args, **named))[1])
    with make() as shadow:
        shadow.generate(prompt(model), max_new_tokens=2, do_sample=False)
        state = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), state)


def test_serves_dicts_and_streams(model, make, log, tokenizers):
    options = {"do_sample": False, "max_new_tokens": 5}
    native = model.generate(**prompt(model), **options, return_dict_in_generate=True, output_logits=True)
    with make() as shadow:
        output = shadow.generate(prompt(model), **options, return_dict_in_generate=True, output_logits=True)
        assert type(output) is type(native)
        assert torch.equal(torch.stack(output.logits), torch.stack(native.logits))
        streamer = TextIteratorStreamer(tokenizers["bpe"], skip_prompt=True)
        thread = threading.Thread(
            target=shadow.generate, args=(prompt(model),), kwargs=options | {"streamer": streamer}
        )
        thread.start()
        assert "".join(streamer) == tokenizers["bpe"].decode(native.sequences[0, 40:])
        thread.join()
    assert [line["reply_tokens"] for line in lines(log)] == [5, 5]


def test_a_line_says_how_the_reply_would_have_fared(model, mapper, make, log):
    inputs = prompt(model)
    with make() as shadow:
        output = shadow.generate(inputs, conversation="abc", **SAMPLING)
    (line,) = lines(log)
    assert line["mapper"] == {"name": mapper.name, "digest": mapper.digest()}
    about = {"conversation": "abc", "turn": 1, "row": 0, "prompt_tokens": 40, "reply_tokens": 6}
    assert about.items() <= line.items()
    assert line["arms"].keys() == {"native", "translated", "no_context"}
    # Independently: the target over prompt and reply at once.
    with torch.no_grad():
        logits = model(output).logits[0, 39:-1]
        short = torch.cat([output[:, :4], output[:, 39:]], 1)
        floor = model(short).logits[0, 4:-1]
    native = F.cross_entropy(logits, output[0, 40:]).item()
    no_context = F.cross_entropy(floor, output[0, 40:]).item()
    assert mean_loss(line, "native") == pytest.approx(native, abs=1e-4)
    assert mean_loss(line, "translated") == pytest.approx(native, abs=1e-4)
    assert mean_loss(line, "no_context") == pytest.approx(no_context, abs=1e-4)
    assert line["arms"]["translated"]["agreement"] == 6
    assert line["gap_recovered"] == pytest.approx(1, abs=1e-3)


def test_a_poor_mapper_is_seen(model, log):
    mapper = identity_mapper(model)
    with torch.no_grad():
        for layer in mapper.layers:
            layer.weight.zero_()
    with ShadowTransfer(mapper, model, model, log=log, rate=1) as shadow:
        shadow.generate(prompt(model), do_sample=True, max_new_tokens=20)
    (line,) = lines(log)
    assert mean_loss(line, "translated") > mean_loss(line, "native") + 0.1
    assert line["gap_recovered"] < 0.9


def test_gap_is_missing_where_the_context_does_not_matter(model, make, log):
    # Of a prompt no longer than the sinks the target reads everything itself, in every arm.
    with make() as shadow:
        shadow.generate(prompt(model, 1, 4), do_sample=False, max_new_tokens=3)
    (line,) = lines(log)
    assert line["gap_recovered"] is None


@pytest.mark.parametrize("rate, expected", [(0, []), (0.5, [1, 3, 6, 7]), (1, list(range(1, 9)))])
def test_rate(model, make, log, rate, expected):
    # Of its own random numbers, so that those of the models and of Python do not matter.
    random.seed(rate)
    with make(rate=rate, seed=3) as shadow:
        for _ in range(8):
            shadow.generate(prompt(model, 1, 5), conversation="a", **SAMPLING | {"max_new_tokens": 1})
    assert [line["turn"] for line in lines(log)] == expected


def test_turns_are_counted_in_each_conversation(model, make, log, monkeypatch):
    monkeypatch.setattr(shadow_module, "MAX_CONVERSATIONS", 2)
    names = ["a", "b", "a", None, "a", "c", "a", "b", None]
    with make() as shadow:
        for name in names:
            shadow.generate(prompt(model, 1, 5), conversation=name, do_sample=False, max_new_tokens=1)
    # "c" made room for itself by having "b" forgotten.
    assert [line["turn"] for line in lines(log)] == [1, 1, 2, None, 3, 1, 4, 1, None]


def test_rows_of_a_padded_batch(model, make, log):
    inputs = prompt(model, 3, 30)
    inputs["attention_mask"][1, :12] = 0
    inputs["input_ids"] = inputs["input_ids"] * inputs["attention_mask"]
    options = {"do_sample": True, "max_new_tokens": 5, "num_return_sequences": 2}
    with make() as shadow:
        output = shadow.generate(inputs, conversation=["a", "b", "a"], **options)
    found = lines(log)
    assert [(line["conversation"], line["turn"], line["row"]) for line in found] == [
        ("a", 1, 0),
        ("b", 1, 1),
        ("a", 1, 2),
    ]
    assert [line["prompt_tokens"] for line in found] == [30, 18, 30]
    for line, ids, pad in zip(found, output[::2], (0, 12, 0), strict=True):
        with torch.no_grad():
            logits = model(ids[None, pad:]).logits[0, 29 - pad : -1]
        assert mean_loss(line, "native") == pytest.approx(F.cross_entropy(logits, ids[30:]).item(), abs=1e-4)
        assert mean_loss(line, "translated") == pytest.approx(mean_loss(line, "native"), abs=1e-4)


def test_padding_is_found_without_a_mask(model, make, log):
    ids = random_ids(model, 2, 20)
    ids[1, :6] = model.config.pad_token_id
    with make() as shadow:
        shadow.generate({"input_ids": ids}, do_sample=False, max_new_tokens=3)
    assert [line["prompt_tokens"] for line in lines(log)] == [20, 14]


@pytest.mark.parametrize("way", ["argument", "config", "model"])
def test_replies_end_at_the_stop_token(model, make, log, way, monkeypatch):
    inputs = prompt(model, 2, 20)
    free = model.generate(**inputs, do_sample=True, max_new_tokens=8)[:, 20:].tolist()
    # The first row stops after some tokens, the other one goes on, and the first is padded.
    stop = next(i for i in range(1, 7) if free[0][i] not in free[0][:i] + free[1])
    eos, options = [free[0][stop], 399], {"do_sample": True, "max_new_tokens": 8}
    if way == "argument":
        options |= {"eos_token_id": eos}
    elif way == "config":
        config = model.generation_config.__class__(**options, eos_token_id=eos, pad_token_id=0)
        options = {"generation_config": config}
    else:
        monkeypatch.setattr(model.generation_config, "eos_token_id", eos)
    torch.manual_seed(0)
    with make() as shadow:
        shadow.generate(inputs, **options)
    found = lines(log)
    assert [line["reply_tokens"] for line in found] == [stop, 8]
    assert found[0]["arms"]["native"]["positions"] == stop


def test_what_cannot_be_compared_is_counted(model, make, log):
    options = {"do_sample": False, "max_new_tokens": 2}
    first = model.generate(**prompt(model), **options)[0, 40].item()
    with make(max_tokens=41) as shadow:
        shadow.generate(prompt(model), **options)
        shadow.generate(prompt(model), **options, eos_token_id=first)
        shadow.generate(prompt(model, 1, 1), **options)
        shadow.generate({"inputs_embeds": torch.randn(1, 5, 64)}, **options)
        assert shadow.drain() == 0
        assert shadow.drain() == 0
    (line,) = lines(log)
    assert line["not_compared"] == {"long": 1, "empty": 1, "short": 1, "not_text": 1}
    summary = shadow.summary()
    assert summary["not_compared"] == line["not_compared"]
    assert summary["compared"] == 0
    assert summary["figures"] is None


def test_the_oldest_is_dropped(model, make, log):
    with make(max_pending=2) as shadow:
        for name in "abcde":
            shadow.generate(prompt(model, 1, 8), conversation=name, do_sample=False, max_new_tokens=1)
        assert shadow.drain() == 2
    *compared, counts = lines(log)
    assert [line["conversation"] for line in compared] == ["d", "e"]
    assert counts["not_compared"] == {"dropped": 3}
    assert shadow.summary()["not_compared"] == {"dropped": 3}


def test_what_is_remembered_does_not_change_with_the_tensors_served(model, make, log):
    inputs = prompt(model)
    with make() as shadow:
        output = shadow.generate(inputs, **SAMPLING)
        expected = F.cross_entropy(model(output).logits[0, 39:-1], output[0, 40:]).item()
        inputs["input_ids"].zero_()
        output.zero_()
    assert mean_loss(lines(log)[0], "native") == pytest.approx(expected, abs=1e-4)


def test_errors_are_logged_and_no_text(model, make, log, monkeypatch, caplog):
    def fail(self, passage, **options):
        raise RuntimeError(f"the secret is {passage.target_ids}")

    logger = logging.getLogger("hf_kvtransfer.fidelity.shadow")
    logger.addHandler(caplog.handler)
    right_padded = prompt(model, 2, 10)
    right_padded["attention_mask"][0, 6:] = 0
    with monkeypatch.context() as patched, make() as shadow:
        patched.setattr(Replay, "score", fail)
        shadow.generate(prompt(model), conversation="a", **SAMPLING)
        shadow.generate(right_padded, **SAMPLING)
        shadow.generate(prompt(model), conversation=["a", "b"], **SAMPLING)
        assert shadow.drain() == 0
    with make() as shadow:
        shadow.generate(prompt(model), conversation="a", **SAMPLING)
    logger.removeHandler(caplog.handler)
    failed, padded, names, compared = lines(log)
    assert failed["error"].startswith("RuntimeError (test_shadow.py, line ")
    assert (failed["conversation"], failed["turn"]) == ("a", 1)
    assert padded["error"].startswith("BatchMismatchError (padding.py")
    assert names["error"].startswith("ValueError (shadow.py")
    assert "arms" in compared
    assert "secret" not in log.read_text() + caplog.text
    summary = shadow.summary()
    assert (summary["compared"], summary["failed"]) == (1, 3)
    assert summary["errors"][failed["error"]] == 1


def test_a_request_that_fails_is_the_targets_own_error(model, make, log):
    with make() as shadow:
        with pytest.raises(ValueError, match="max_new_tokens"):
            shadow.generate(prompt(model), conversation="a", max_new_tokens=-1)
        shadow.generate(prompt(model), conversation="a", do_sample=False, max_new_tokens=1)
    assert [line["turn"] for line in lines(log)] == [1]


def test_an_interruption_is_not_held_up(model, make, log):
    with pytest.raises(KeyboardInterrupt), make() as shadow:
        shadow.generate(prompt(model), max_new_tokens=1)
        raise KeyboardInterrupt
    assert lines(log) == []
    with pytest.raises(RuntimeError), make() as shadow:
        shadow.generate(prompt(model), max_new_tokens=1)
        raise RuntimeError
    assert len(lines(log)) == 1


def test_an_interrupted_drain_goes_on(model, make, log, monkeypatch):
    score, scored = Replay.score, []

    def interrupted(self, passage, **options):
        scored.append(passage)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(self, passage, **options)

    monkeypatch.setattr(Replay, "score", interrupted)
    shadow = make(max_pending=4)
    for name in "abcde":
        shadow.generate(prompt(model, 1, 8), conversation=name, do_sample=False, max_new_tokens=1)
    with pytest.raises(KeyboardInterrupt):
        shadow.drain()
    assert [line["conversation"] for line in lines(log)] == ["b"]
    assert shadow.drain() == 2
    *compared, counts = lines(log)
    assert [line["conversation"] for line in compared] == ["b", "d", "e"]
    assert counts["not_compared"] == {"dropped": 1}


def test_two_drains_do_not_overlap(model, make, log, monkeypatch):
    score, at_work, overlaps = Replay.score, threading.Lock(), []

    def counted(self, passage, **options):
        if not at_work.acquire(blocking=False):
            overlaps.append(passage)
            return score(self, passage, **options)
        try:
            time.sleep(0.05)
            return score(self, passage, **options)
        finally:
            at_work.release()

    monkeypatch.setattr(Replay, "score", counted)
    shadow = make()
    for _ in range(4):
        shadow.generate(prompt(model, 1, 8), do_sample=False, max_new_tokens=1)
    with ThreadPoolExecutor(2) as pool:
        drains = [pool.submit(shadow.drain) for _ in range(2)]
        assert sum(drain.result() for drain in drains) == 4
    assert not overlaps
    assert len(lines(log)) == 4


def test_requests_that_come_in_while_draining_wait_for_the_next(model, make, log, monkeypatch):
    score = Replay.score
    options = {"do_sample": False, "max_new_tokens": 1}

    def served(self, passage, **named):
        shadow.generate(prompt(model, 1, 8), **options)
        return score(self, passage, **named)

    monkeypatch.setattr(Replay, "score", served)
    shadow = make()
    for _ in range(2):
        shadow.generate(prompt(model, 1, 8), **options)
    assert shadow.drain() == 2
    assert shadow.drain() == 2


def test_an_accelerator_that_is_no_gpu_of_cuda(model, make, log, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: torch.cuda.device_count() + 1)
    with make() as shadow:
        shadow.generate(prompt(model), **SAMPLING)
        assert shadow.drain() == 1


def test_a_model_in_training_mode_is_refused(model, mapper, log):
    with pytest.raises(ValueError, match=r"`source` is in training mode.*source.eval\(\)"):
        ShadowTransfer(mapper, copy.deepcopy(model).train(), model, log=log)
    assert not log.exists()


def test_a_log_that_fails_later_does_not_stop_the_service(model, make, log):
    with make() as shadow:
        shadow.generate(prompt(model), max_new_tokens=1)
        log.unlink()
        log.mkdir()
        assert shadow.drain() == 0


def test_the_source_reads_the_text_where_tokenizers_differ(model, tokenizers, log):
    mapper = identity_mapper(model)
    source_side, target_side = tokenizers["wordpiece"], tokenizers["unigram"]
    mapper.config.source = mapper.config.source | {"tokenizer": tokenizer_fingerprint(source_side)}
    mapper.config.target = mapper.config.target | {"tokenizer": tokenizer_fingerprint(target_side)}
    with pytest.raises(TokenizerMismatchError, match="pass the source's tokenizer"):
        ShadowTransfer(mapper, model, model, log=log)
    text = "the farmers wait for the flood of the river, and the delta gives them silt and fish."
    inputs = target_side(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with ShadowTransfer(
        mapper, model, model, log=log, source_tokenizer=source_side, target_tokenizer=target_side, rate=1
    ) as shadow:
        shadow.generate(inputs, **SAMPLING)
    (line,) = lines(log)
    assert line["prompt_tokens"] == inputs["input_ids"].shape[1]
    # The states of other tokens are poor, but there: the text was read and aligned.
    assert line["arms"]["translated"]["positions"] == line["reply_tokens"]
    assert mean_loss(line, "translated") != pytest.approx(mean_loss(line, "native"), abs=1e-4)
    assert text not in log.read_text()


def test_summary_over_turns(model, make, log):
    with make() as shadow:
        shadow.generate(prompt(model, 8, 20), conversation=list("abcdefgh"), **SAMPLING)
        shadow.generate(prompt(model, 2, 30), conversation=["a", "b"], **SAMPLING)
        shadow.generate(prompt(model), **SAMPLING)
    summary = shadow.summary()
    figures = summary["figures"]
    assert (summary["compared"], figures["documents"], figures["positions"]) == (11, 9, 11 * 6)
    assert [(turn["turn"], turn["documents"]) for turn in figures["turns"]] == [(1, 8), (2, 2)]
    assert figures["arms"]["translated"]["gap_recovered"]["value"] == pytest.approx(1, abs=1e-3)
    losses = [line["arms"]["no_context"]["loss"] for line in lines(log)]
    assert figures["arms"]["no_context"]["loss"] == pytest.approx(sum(losses) / (11 * 6))
    assert summary == summarize_shadow_log(log)


def test_a_log_is_continued_after_a_crash(model, mapper, make, log):
    options = {"conversation": "a", "do_sample": False, "max_new_tokens": 3}
    with make() as shadow:
        shadow.generate(prompt(model), **options)
        shadow.generate(prompt(model), **options)
    log.write_bytes(log.read_bytes()[:-50])
    assert summarize_shadow_log(log)["damaged"] == 1
    with make() as shadow:
        shadow.generate(prompt(model), **options)
    summary = shadow.summary()
    # The conversation began anew, its first turn is there twice.
    assert (summary["compared"], summary["damaged"]) == (2, 1)
    assert summary["figures"]["turns"][0]["documents"] == 2


def test_a_log_of_several_mappers_is_told_apart(model, mapper, make, log):
    other = identity_mapper(model)
    with torch.no_grad():
        other.layers[0].weight.zero_()
    for number, current in enumerate((mapper, other, other)):
        with ShadowTransfer(current, model, model, log=log, rate=1) as shadow:
            shadow.generate(prompt(model, seed=number), do_sample=False, max_new_tokens=1)
    assert summarize_shadow_log(log)["mapper"]["digest"] == other.digest()
    assert summarize_shadow_log(log)["compared"] == 2
    assert summarize_shadow_log(log, mapper.digest())["compared"] == 1
    assert shadow.summary()["compared"] == 2


DAMAGES = [
    {"arms": None},
    {"arms": {}},
    {"turn": 0},
    {"turn": "1"},
    {"conversation": None, "turn": []},
    {"mapper": None},
    {"loss": -1},
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_lines_that_were_edited_are_damaged(model, make, log, damage):
    with make() as shadow:
        shadow.generate(prompt(model), conversation="a", max_new_tokens=1)
    (line,) = lines(log)
    if "loss" in damage:
        line["arms"]["native"] |= damage
    else:
        line |= damage
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n[1]\n")
    summary = shadow.summary()
    assert (summary["compared"], summary["damaged"]) == (1, 2)


def test_bad_arguments(model, mapper, tmp_path):
    def make(**options):
        return ShadowTransfer(mapper, model, model, **{"log": tmp_path / "log.jsonl"} | options)

    for options in ({"rate": -0.1}, {"rate": 1.1}, {"rate": float("nan")}, {"max_tokens": 0}, {"max_pending": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
            make(**options)
    assert not (tmp_path / "log.jsonl").exists()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "log.jsonl"):
        with pytest.raises(ValueError, match="`log` cannot be written"):
            make(log=path)
    with pytest.raises(PairMismatchError):
        ShadowTransfer(mapper, tiny_model("gemma3"), model, log=tmp_path / "log.jsonl")
    with pytest.raises(EvidenceError, match=r"nowhere\.jsonl cannot be read"):
        summarize_shadow_log(tmp_path / "nowhere.jsonl")


def test_processes_share_a_log(log):
    writers = [ShadowLog(log) for _ in range(2)]
    for number in range(6):
        writers[number % 2].append({"number": number})
    assert [line["number"] for line in lines(log)] == list(range(6))

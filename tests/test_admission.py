"""The effort that the evidence asks for."""

import copy
import dataclasses

import pytest
import torch

from hf_kvtransfer import (
    FidelityGate,
    RefusedError,
    Segment,
    SourceKV,
    TransferPolicy,
    TranslatedCache,
    evaluate_mapper,
)
from hf_kvtransfer.hub.card import mapper_card
from hf_kvtransfer.reuse import TranslatedChunks

from .fidelity.evidence import passage
from .policy.test_policy import COSTS
from .tiny_models import own_texts, plant, planted_mapper, tiny_model
from .tiny_tokenizers import byte_level_bpe


CONTEXT, CONTINUATION = 40, 24
EFFORTS = (0.25, 0.6)
ARMS = ("translated", "effort 0.25", "effort 0.6")
# What tiny models give is little.
LOOSE = {"min_agreement": 0.0, "max_control": 1.0, "min_positions": 8}
THRESHOLD = FidelityGate(min_gap_recovered=0.5, **LOOSE)


@pytest.fixture(scope="module")
def source():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def target(source):
    return plant(source)


@pytest.fixture(scope="module")
def texts(source):
    return own_texts(source, 9, CONTEXT + CONTINUATION, 0.3, pad_token_id=0)


@pytest.fixture(scope="module")
def noisy(source, target):
    mapper, generator = planted_mapper(source, target), torch.Generator().manual_seed(0)
    for layer in mapper.layers:
        layer.weight.data += 0.01 * torch.randn(layer.weight.shape, generator=generator)
    return mapper


@pytest.fixture(scope="module")
def report(noisy, source, target, texts):
    lengths = {"context_tokens": CONTEXT, "continuation_tokens": CONTINUATION}
    return evaluate_mapper(noisy, source, target, texts.tolist(), **lengths, efforts=EFFORTS)


@pytest.fixture
def mapper(noisy, report):
    return with_evidence(noisy, report)


@pytest.fixture
def source_kv(source, texts):
    return SourceKV.prefill(source, None, texts[:1, :CONTEXT])


def with_evidence(mapper, report):
    other = copy.copy(mapper)
    other.evidence = report
    return other


def with_gaps(mapper, report, *gaps):
    """The mapper, as if its translation, and with so many of the efforts, had recovered these shares of the gap."""
    losses = {arm: 2.0 - gap for arm, gap in zip(ARMS, gaps, strict=False)}
    controls = {"other_document": 2.1, "no_context": 2.0, "random_map": 2.2}
    results = [passage(f"{number}", native=1.0, **losses, **controls) for number in range(8)]
    for score in (score for row in results for score in row.arms.values()):
        score.agreement = score.positions
    return with_evidence(mapper, dataclasses.replace(report, results=results, figures=None))


def cached(source_kv, mapper, target, **options):
    return TranslatedCache(source_kv, mapper, target, **{"gate": THRESHOLD, "on_refusal": "raise"} | options)


def test_the_least_effort_that_was_measured_to_be_enough(source_kv, mapper, target, report):
    gaps = [report.figures["arms"][arm]["gap_recovered"]["value"] for arm in ARMS]
    assert gaps == sorted(gaps) and gaps[0] < gaps[1] < gaps[2]
    for number, effort in enumerate((0.0, *EFFORTS)):
        lower = gaps[number - 1] if number else gaps[0] - 0.1
        gate = FidelityGate(min_gap_recovered=(lower + gaps[number]) / 2, **LOOSE)
        cache = cached(source_kv, mapper, target, effort="auto", gate=gate)
        assert cache.report.effort == cache.report.verdict.effort == effort
        same = cached(source_kv, mapper, target, effort=effort, gate=gate)
        assert torch.equal(cache.translated_mask, same.translated_mask)
        assert len(cache.report.effort_reasons) == bool(effort)
    assert f"with an effort of 0.25 it recovers {gaps[1]:.2f} of the gap" in cache.report.effort_reasons[0]
    assert "; effort 0.6" in str(cache.report) and "less is refused\n  - with an effort of 0.25" in str(cache.report)


def test_none_is_enough(source_kv, mapper, target, report, texts):
    gate = FidelityGate(min_gap_recovered=1.0, **LOOSE)
    cache = cached(source_kv, mapper, target, effort="auto", gate=gate, on_refusal="recompute")
    assert (cache.report.outcome, cache.get_seq_length(), cache.report.effort) == ("recomputed", 0, 0.0)
    (reason,) = cache.report.reasons
    assert reason.startswith("with an effort of 0.6 it recovers")
    ids = texts[:1, : CONTEXT + 3]
    found = target.generate(**cache.prepare({"input_ids": ids}), max_new_tokens=3, do_sample=False)
    assert torch.equal(found, target.generate(ids, max_new_tokens=3, do_sample=False))
    with pytest.raises(RefusedError, match="with an effort of 0.6 refused"):
        cached(source_kv, mapper, target, effort="auto", gate=gate)


def test_an_effort_is_judged_by_the_largest_measured_one_below(source_kv, noisy, target, report):
    mapper = with_gaps(noisy, report, 0.2, 0.4, 0.8)
    for effort in (0.6, 0.7, 1.0):
        cache = cached(source_kv, mapper, target, effort=effort)
        assert cache.report.verdict.admitted and cache.report.effort == effort
        assert cache.report.effort_reasons == ()
    reasons = {0.0: "- it recovers 0.20", 0.2: "- it recovers 0.20", 0.5: "- with an effort of 0.25 it recovers 0.40"}
    for effort, reason in reasons.items():
        with pytest.raises(RefusedError, match=reason):
            cached(source_kv, mapper, target, effort=effort)


def test_evidence_without_efforts(source_kv, noisy, target, report):
    good, mapper = with_gaps(noisy, report, 0.7), with_gaps(noisy, report, 0.4)
    assert cached(source_kv, good, target, effort="auto").report.effort == 0
    with pytest.raises(RefusedError, match=": refused\n  - it recovers"):
        cached(source_kv, mapper, target, effort="auto")
    # A gate that is not strict admits everything, with no effort.
    lax = FidelityGate(strict=False)
    for other in (mapper, noisy):
        report = cached(source_kv, other, target, effort="auto", gate=lax).report
        assert (report.outcome, report.effort) == ("translated", 0)
    with pytest.raises(RefusedError, match="it has no evidence"):
        cached(source_kv, noisy, target, effort="auto")


@pytest.mark.parametrize(
    ("first", "second", "effort"),
    [
        ((0.2, 0.6, 0.8), (0.2, 0.4, 0.8), 0.6),
        ((0.2, 0.4, 0.8), (0.7, 0.8, 0.9), 0.6),
        # The first one is admitted with 0.25 alone.
        ((0.2, 0.6, 0.6), (0.6, 0.6, 0.6), 0.25),
        ((0.6, 0.6, 0.6), (0.1, 0.2, 0.3), 0.0),
    ],
)
def test_several_mappers(source, target, texts, noisy, report, first, second, effort):
    ids = texts[:1, :CONTEXT]
    mappers = with_gaps(noisy, report, *first), with_gaps(noisy, report, *second)
    segments = [
        Segment(start, start + 20, SourceKV.prefill(source, None, ids[:, start : start + 20]), mapper)
        for start, mapper in zip((0, 20), mappers, strict=True)
    ]
    cache = TranslatedCache.from_segments(segments, target, ids, effort="auto", gate=THRESHOLD)
    assert cache.report.effort == effort
    again = round(effort * 35 + 0.49)
    if second[-1] > 0.5:
        assert cache.report.reasons == () and cache.report.translated_tokens == 35 - again
    else:
        assert "with an effort of 0.6 it recovers 0.30" in cache.report.reasons[0]
        assert cache.report.translated_tokens == 16


def test_mappers_that_no_effort_admits_together(source, target, texts, noisy, report):
    """Measured twice, the larger effort may come out worse."""
    ids = texts[:1, :CONTEXT]
    mappers = with_gaps(noisy, report, 0.2, 0.6, 0.4), with_gaps(noisy, report, 0.2, 0.4, 0.6)
    segments = [
        Segment(start, start + 20, SourceKV.prefill(source, None, ids[:, start : start + 20]), mapper)
        for start, mapper in zip((0, 20), mappers, strict=True)
    ]
    cache = TranslatedCache.from_segments(segments, target, ids, effort="auto", gate=THRESHOLD)
    assert cache.report.effort == 0.25
    assert "it recovers 0.40 of the gap" in cache.report.reasons[0]
    assert not cache.translated_mask[:, 20:].any()


def test_a_policy_counts_what_will_be_read_again(source_kv, noisy, target, report, monkeypatch):
    policy, asked = TransferPolicy(COSTS), []
    decide = policy.decide
    monkeypatch.setattr(policy, "decide", lambda *args: asked.append(args[2]) or decide(10**6, 1, *args[2:]))
    mapper = with_gaps(noisy, report, 0.2, 0.6, 0.8)
    assert cached(source_kv, mapper, target, effort="auto", policy=policy).report.effort == 0.25
    # Of one that will be refused nothing is read again, since nothing is translated.
    with pytest.raises(RefusedError, match="it recovers"):
        cached(source_kv, with_gaps(noisy, report, 0.1, 0.1, 0.1), target, effort="auto", policy=policy)
    assert asked == [0.25, 0.0]


def test_a_card_names_the_effort(noisy, report):
    card = str(mapper_card(with_gaps(noisy, report, 0.2, 0.6, 0.8), "org/pair"))
    assert "**The default gate refuses it**" in card
    assert 'With `effort=0.25`, which `effort="auto"` takes, it is admitted. A use that asks' in card
    assert "| the same, effort 0.6 " in card and "gap, effort 0.25" in card


def test_what_is_no_effort(source_kv, mapper, target, source):
    with pytest.raises(ValueError, match="or \"auto\", got 'most'"):
        cached(source_kv, mapper, target, effort="most")
    tokenizer = byte_level_bpe()
    options = {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    assert TranslatedChunks(source, target, mapper, effort="auto", **options).effort == "auto"
    with pytest.raises(ValueError, match="or \"auto\", got 'most'"):
        TranslatedChunks(source, target, mapper, effort="most", **options)
    for effort in ("auto", 1.1):
        with pytest.raises(ValueError, match="`effort` must be between 0"):
            TransferPolicy(COSTS).decide(1000, effort=effort)
        with pytest.raises(ValueError, match="`effort` must be between 0"):
            THRESHOLD.judge(mapper.evidence, effort)

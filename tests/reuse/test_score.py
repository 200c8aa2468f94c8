import pytest

from hf_kvtransfer import FidelityGate
from hf_kvtransfer.fidelity.prompts import PromptEncoder
from hf_kvtransfer.reuse import MethodScore, ReuseQuestion, ReuseRequest, TranslatedChunks, score_reuse

from ..tiny_models import identity_mapper, tiny_model


CHUNKS = ("The river carries silt.", " The farmers wait for the flood.", " It gives them water and fish.")
# One that is likelier with the chunks than without, also to a random model.
ANSWER = CHUNKS[1]
UNGATED = FidelityGate(strict=False)


def question(number=0, num_sources=1):
    return ReuseQuestion((f"Day {number}. {CHUNKS[0]}", *CHUNKS[1:]), " What gives?", ANSWER, num_sources)


@pytest.fixture(scope="module")
def first_chunk_only(llama, tokenizers):
    """Reuses what stands at the same positions in both: exact."""

    class FirstChunk(TranslatedChunks):
        def prepare(self, request, built):
            alone = ReuseRequest(request.input_ids, request.ranges[:1], request.answer_ids, request.num_front)
            return super().prepare(alone, built[:1])

    tokenizer = tokenizers["bpe"]
    return FirstChunk(
        llama, llama, identity_mapper(llama), source_tokenizer=tokenizer, target_tokenizer=tokenizer, gate=UNGATED
    )


def chunks(model, tokenizer, **options):
    mapper = identity_mapper(model)
    options |= {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer, "gate": UNGATED}
    return TranslatedChunks(model, model, mapper, **options)


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_a_request_has_each_chunk_as_it_was_read(name, tokenizers):
    encoder = PromptEncoder(tokenizers[name])
    request = ReuseRequest.make(question(), encoder)
    front = len(encoder.front)
    assert request.num_front == front == (name == "unigram")
    alone = [encoder.encode(chunk)[0] for chunk in question().chunks]
    for (start, stop), ids in zip(request.ranges, alone, strict=True):
        assert request.input_ids[0, start:stop].tolist() == ids[front if start else 0 :]
    assert request.without_context()[0].tolist() == encoder.encode(" What gives?")[0]


def test_exact_reuse_recovers_the_gap_at_less_compute(llama, tokenizers, first_chunk_only, monkeypatch):
    built = []
    build = first_chunk_only.build
    monkeypatch.setattr(first_chunk_only, "build", lambda chunk: built.append(chunk) or build(chunk))
    asked = [question(i % 4) for i in range(8)]
    score = score_reuse(asked, llama, tokenizers["bpe"], {"first": first_chunk_only})
    assert len(built) == 6  # each once: four first chunks, and two that all have
    (scores,) = score.groups.values()
    assert list(score.groups) == ["one source"]
    full, floor, first = scores["full prefill"], scores["no context"], scores["first"]
    assert first.loss == pytest.approx(full.loss, abs=1e-4)
    assert full.compute_saved == 0
    assert 0.05 < first.compute_saved < floor.compute_saved < 1
    assert first.held_bytes > full.held_bytes == 0
    assert first.seconds > 0 and score.build_seconds["first"] > 0
    assert full.gap_recovered["value"] == 1 and floor.gap_recovered["value"] == 0
    for end in ("value", "low", "high"):
        assert first.gap_recovered[end] == pytest.approx(1, abs=1e-2)
    assert first.share_score(0.1) > first.share_score(1.0)


def test_groups_are_apart(llama, tokenizers):
    asked = [question(i, num_sources=1 + i % 2) for i in range(3)]
    score = score_reuse(asked, llama, tokenizers["bpe"], {"moved": chunks(llama, tokenizers["bpe"])})
    assert {group: scores["moved"].questions for group, scores in score.groups.items()} == {
        "one source": 2,
        "several sources": 1,
    }
    one, several = score.tables()
    assert one.title == "Questions that need one source"
    assert [row[0] for row in several.rows] == ["full prefill", "no context", "moved"]
    assert "Building them, once: moved" in one.note
    assert all(row[2] == "-" for row in one.rows)  # too few questions to say


def test_chunks_that_are_moved_are_not_what_a_prefill_makes(llama, tokenizers):
    """Later chunks have not seen the earlier ones, unless all of them is read again."""
    options = {"moved": {}, "again": {"reread_tokens": 1000}, "some": {"effort": 0.3}, "all": {"effort": 1.0}}
    methods = {name: chunks(llama, tokenizers["bpe"], **given) for name, given in options.items()}
    score = score_reuse([question()], llama, tokenizers["bpe"], methods)
    scores = score.groups["one source"]
    assert scores["all"].loss == pytest.approx(scores["full prefill"].loss, abs=1e-4)
    assert abs(scores["some"].loss - scores["moved"].loss) > 1e-3
    assert abs(scores["moved"].loss - scores["full prefill"].loss) > 1e-3
    assert scores["again"].loss == pytest.approx(scores["full prefill"].loss, abs=1e-4)
    assert scores["again"].compute_saved < scores["moved"].compute_saved


def test_other_tokenizer_in_front(tokenizers):
    model = tiny_model("gemma3")
    score = score_reuse([question()], model, tokenizers["unigram"], {"moved": chunks(model, tokenizers["unigram"])})
    assert score.groups["one source"]["moved"].loss > 0


@pytest.mark.parametrize(
    ("gap", "saved", "beta", "expected"),
    [(0.5, 0.5, 1.0, 0.5), (1.0, 0.5, 0.1, 1.1 * 0.5 / 0.6), (1.2, 1.0, 1.0, 1.0), (0.9, -0.3, 0.1, 0.0)],
)
def test_share_score(gap, saved, beta, expected):
    score = MethodScore(8, 1.0, {"value": gap, "low": gap, "high": gap}, saved, 1.0, 0)
    assert score.share_score(beta) == pytest.approx(expected)


def test_share_score_of_nothing_to_recover():
    assert MethodScore(8, 1.0, None, 0.5, 1.0, 0).share_score(1.0) is None


@pytest.mark.parametrize(
    ("chunks", "answer", "num_sources"), [((), " x", 1), (("a",), "", 1), (("a",), " x", 2), ("ab", " x", 1)]
)
def test_questions_that_are_none(chunks, answer, num_sources):
    with pytest.raises(ValueError):
        ReuseQuestion(chunks, "?", answer, num_sources)


def test_nothing_to_score(llama, tokenizers):
    with pytest.raises(ValueError, match="`questions` is empty"):
        score_reuse([], llama, tokenizers["bpe"], {})
    with pytest.raises(ValueError, match="which is measured anyway"):
        score_reuse([question()], llama, tokenizers["bpe"], {"no context": None})
    with pytest.raises(ValueError, match="reread_tokens"):
        chunks(llama, tokenizers["bpe"], reread_tokens=-1)
    with pytest.raises(ValueError, match="effort"):
        chunks(llama, tokenizers["bpe"], effort=2.0)

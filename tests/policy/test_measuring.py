import pytest

from hf_kvtransfer import PairMismatchError, TransferPolicy, measure_costs
from hf_kvtransfer.home import HOME_VARIABLE
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint
from hf_kvtransfer.policy import measuring

from ..tiny_models import identity_mapper, tiny_model


LENGTHS = (32, 96)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def count(monkeypatch):
    """How often a prefill or a handoff was timed."""
    calls = []
    seconds = measuring._seconds
    monkeypatch.setattr(measuring, "_seconds", lambda function: calls.append(function.__name__) or seconds(function))
    return calls


def test_measures_both_at_each_length(llama, count):
    costs = measure_costs(identity_mapper(llama), llama, llama, lengths=LENGTHS, runs=2)
    assert count == ["prefill", "handoff"] * 5  # one to warm up
    assert [row["tokens"] for row in costs.measured] == [32, 96]
    for row in costs.measured:
        for name in ("prefill", "handoff", "source_prefill"):
            assert row[name] > 0
    assert costs.device == "cpu"
    # 4 layers of 2 heads, keys and values of 16 floats.
    assert costs.cache_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert costs.first_layers == 1 / 4
    assert costs.handoff_bytes(10, 2) == 20 * (costs.cache_bytes_per_token + 2 * 2 * 2 * 16 * 4)


def test_is_read_from_disk_the_next_time(llama, count, home):
    mapper = identity_mapper(llama)
    costs = measure_costs(mapper, llama, llama, lengths=LENGTHS, runs=1)
    measured = len(count)
    assert measure_costs(mapper, llama, llama, lengths=LENGTHS, runs=1) == costs
    assert len(count) == measured
    # Other shapes, another mapper, or on demand.
    other = tiny_model("llama", num_hidden_layers=2)
    for again in (
        lambda: measure_costs(identity_mapper(other), other, other, lengths=LENGTHS, runs=1),
        lambda: measure_costs(identity_mapper(llama, sink_tokens=2), llama, llama, lengths=LENGTHS, runs=1),
        lambda: measure_costs(mapper, llama, llama, lengths=LENGTHS, runs=1, fresh=True),
    ):
        again()
        assert len(count) > measured
        measured = len(count)
    for file in (home / "costs").iterdir():
        file.write_text("{damaged")
    measure_costs(mapper, llama, llama, lengths=LENGTHS, runs=1)
    assert len(count) > measured


def test_across_tokenizers(llama, tokenizers, home):
    mapper = identity_mapper(llama)
    for side, name in (("source", "bpe"), ("target", "unigram")):
        described = getattr(mapper.config, side) | {"tokenizer": tokenizer_fingerprint(tokenizers[name])}
        setattr(mapper.config, side, described)
    pair = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": tokenizers["unigram"]}
    costs = measure_costs(mapper, llama, llama, lengths=LENGTHS, runs=1, **pair)
    assert [row["tokens"] for row in costs.measured] == [32, 96]


def test_mapper_of_another_pair(llama, gemma, home):
    with pytest.raises(PairMismatchError):
        measure_costs(identity_mapper(llama), llama, gemma, lengths=LENGTHS, runs=1)
    assert not (home / "costs").exists()


def test_lengths_that_no_model_reads(llama):
    with pytest.raises(ValueError, match="of 2 to 512 tokens"):
        measure_costs(identity_mapper(llama), llama, llama, lengths=(128, 1024))
    with pytest.raises(ValueError, match="`runs` must be at least 1"):
        measure_costs(identity_mapper(llama), llama, llama, runs=0)


def test_calibrated_policy(llama):
    policy = TransferPolicy.calibrate(identity_mapper(llama), llama, llama, lengths=LENGTHS, runs=1, concurrency=2)
    assert policy.concurrency == 2
    assert policy.error_rates == {0: 1.0}  # there is no evidence
    assert policy.refusal_rate == 0.0
    assert policy.decide(64).prefill_seconds > 0

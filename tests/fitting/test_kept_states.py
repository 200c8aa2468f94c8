"""What one fit has read, another one takes from files."""

import pytest
import torch

from hf_kvtransfer import fit_mapper

from ..tiny_models import random_ids, tiny_model
from ..tiny_tokenizers import SENTENCES


OPTIONS = {"dtype": torch.float32, "batch_size": 3}


@pytest.fixture(scope="module")
def pair():
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    return source, target, list(random_ids(source, 24, 40, seed=1))


@pytest.fixture
def runs(pair):
    """How often the two models have read."""
    counts = [0, 0]
    hooks = []
    for side, model in enumerate(pair[:2]):

        def count(*_, side=side):
            counts[side] += 1

        hooks.append(model.model.register_forward_hook(count))
    yield counts
    for hook in hooks:
        hook.remove()


def assert_same(mapper, other):
    for ours, theirs in zip(mapper.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert mapper.config.layers == other.config.layers


def test_other_fits_let_no_model_read(pair, runs, tmp_path):
    first = fit_mapper(*pair, num_source_layers=1, keep_states=tmp_path, **OPTIONS)
    assert len(list(tmp_path.iterdir())) == 2 * len(pair[2])
    assert runs[0] >= 8
    for options in ({"num_source_layers": 1}, {"num_source_layers": 2}, {"kind": "low_rank", "rank": 4}):
        runs[:] = 0, 0
        mapper = fit_mapper(*pair, keep_states=tmp_path, **options, **OPTIONS)
        assert runs == [0, 0]
        assert_same(mapper, first if options == {"num_source_layers": 1} else fit_mapper(*pair, **options, **OPTIONS))


def test_tokens_before_are_kept_too(pair, runs, tmp_path):
    options = {"num_source_layers": 1, "previous_tokens": 2, **OPTIONS}
    first = fit_mapper(*pair, keep_states=tmp_path, **options)
    runs[:] = 0, 0
    assert_same(fit_mapper(*pair, keep_states=tmp_path, **options), first)
    assert runs == [0, 0]


def test_what_is_not_there_is_read(pair, runs, tmp_path):
    options = {"num_source_layers": 1, **OPTIONS}
    first = fit_mapper(*pair, keep_states=tmp_path, **options)
    files = sorted(tmp_path.iterdir())
    files[0].write_bytes(files[1].read_bytes()[:100])
    files[-1].unlink()
    runs[:] = 0, 0
    assert_same(fit_mapper(*pair, keep_states=tmp_path, **options), first)
    assert 0 < runs[0] <= 2
    assert sorted(tmp_path.iterdir()) == files
    # Other native layers are other features of the tokens, and nothing else.
    runs[:] = 0, 0
    mapper = fit_mapper(*pair, keep_states=tmp_path, native_layers=1, **options)
    assert runs[0] > 0
    assert len(list(tmp_path.iterdir())) == len(files) + len(pair[2])
    assert_same(mapper, fit_mapper(*pair, native_layers=1, **options))
    runs[:] = 0, 0
    fit_mapper(*pair, keep_states=tmp_path, token_features=False, **options)
    assert runs == [0, 0]


def test_another_model_is_read(pair, runs, tmp_path):
    options = {"num_source_layers": 1, **OPTIONS}
    fit_mapper(*pair, keep_states=tmp_path, **options)
    other = tiny_model("llama", seed=7)
    expected = fit_mapper(other, *pair[1:], **options)
    assert_same(fit_mapper(other, *pair[1:], keep_states=tmp_path, **options), expected)


def test_two_tokenizers(tokenizers, tmp_path):
    source, target = tiny_model("llama"), tiny_model("gemma3", seed=1)
    texts = [" ".join(SENTENCES[i:] + SENTENCES[:i]) for i in range(len(SENTENCES))] * 2
    sides = {"source_tokenizer": tokenizers["bpe"], "target_tokenizer": tokenizers["unigram"]}
    options = {"num_source_layers": 1, **sides, **OPTIONS}
    expected = fit_mapper(source, target, texts, **options)
    for _ in range(2):
        assert_same(fit_mapper(source, target, texts, keep_states=tmp_path, **options), expected)


def test_full_disk_costs_no_fit(pair, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_kvtransfer.fitting.kept_states.save_file", full)
    options = {"num_source_layers": 1, **OPTIONS}
    assert_same(fit_mapper(*pair, keep_states=tmp_path, **options), fit_mapper(*pair, **options))
    assert list(tmp_path.iterdir()) == []

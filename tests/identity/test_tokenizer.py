import gc
import json
import weakref

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_kvtransfer.errors import TokenizerMismatchError
from hf_kvtransfer.identity import tokenizer as tokenizer_identity
from hf_kvtransfer.identity.tokenizer import tokenizer_fingerprint


VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5, "<s>": 6}
MERGES = [("a", "b"), ("ab", "c"), ("b", "c")]
ADDED = [AddedToken("<s>", special=True)]


def build(vocab=VOCAB, merges=MERGES, added=ADDED):
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_same_rules_same_fingerprint(tmp_path):
    fingerprint = tokenizer_fingerprint(build())
    assert len(fingerprint) == 32 and int(fingerprint, 16) >= 0
    assert tokenizer_fingerprint(build(vocab=dict(reversed(VOCAB.items())))) == fingerprint
    build().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    # The same contents, other bytes and another order of keys.
    contents = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(contents.items())), indent=4))
    assert tokenizer_fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == fingerprint


def test_what_leaves_the_ids_alone_does_not_count():
    tokenizer = build()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 6)])
    backend.enable_truncation(7)
    backend.enable_padding(length=9)
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(build())


@pytest.mark.parametrize(
    "other",
    [
        build(vocab={**VOCAB, "a": 1, "b": 0}),
        build(merges=MERGES[::-1]),
        build(merges=MERGES[:2]),
        build(added=[AddedToken("<s>", special=False)]),
        build(added=[AddedToken("<s>", special=True, lstrip=True)]),
        build(added=[AddedToken("<s>", special=True, rstrip=True)]),
        build(added=[AddedToken("<s>", special=True, normalized=True)]),
        build(added=[*ADDED, AddedToken("<t>")]),
    ],
)
def test_what_changes_the_ids_counts(other):
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(build())


def test_changes_after_the_first_call_are_seen():
    tokenizer = build()
    seen = [tokenizer_fingerprint(tokenizer)]
    tokenizer.add_tokens(["<extra>"])
    seen.append(tokenizer_fingerprint(tokenizer))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    seen.append(tokenizer_fingerprint(tokenizer))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    seen.append(tokenizer_fingerprint(tokenizer))
    assert len(set(seen)) == 4


def test_read_once_and_not_kept_alive(monkeypatch):
    tokenizer = build()
    fingerprint = tokenizer_fingerprint(tokenizer)
    monkeypatch.setattr(tokenizer_identity, "_fingerprint", lambda serialized: pytest.fail("read again"))
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    reference = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None


def test_other_models_have_fingerprints():
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)))
    rescored = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -2.0)], 0)))
    wordpiece = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"a": 0}, unk_token="a")))
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in (unigram, rescored, wordpiece)}) == 3


def test_a_slow_tokenizer_is_refused():
    class SlowTokenizer:
        pass

    with pytest.raises(TokenizerMismatchError, match="SlowTokenizer is not a fast tokenizer.*tokenizer.json"):
        tokenizer_fingerprint(SlowTokenizer())


def test_components_in_python_are_refused():
    class Custom:
        def normalize(self, normalized):
            normalized.lowercase()

    tokenizer = build()
    tokenizer.backend_tokenizer.normalizer = normalizers.Normalizer.custom(Custom())
    with pytest.raises(TokenizerMismatchError, match="cannot be written out"):
        tokenizer_fingerprint(tokenizer)

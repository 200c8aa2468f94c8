import pytest

from hf_kvtransfer import CalibrationError
from hf_kvtransfer.fitting import round_trip
from hf_kvtransfer.fitting.round_trip import lost_characters, round_trips

from ..tiny_tokenizers import SENTENCES


def test_what_normalizers_change_is_not_lost(tokenizers):
    for text in SENTENCES:
        assert lost_characters(tokenizers["bpe"], text) is None
        assert lost_characters(tokenizers["unigram"], text) is None
    assert lost_characters(tokenizers["wordpiece"], "The FARMERS wait for the  flood.") is None


def test_unknown_characters_are_lost(tokenizers):
    assert lost_characters(tokenizers["bpe"], "ฝน rain") is None
    assert lost_characters(tokenizers["unigram"], "The flood ฝน rain").startswith("ฝน")


def test_few_lost_texts_are_left_out(tokenizers, monkeypatch):
    warnings = []
    monkeypatch.setattr(round_trip.logger, "warning", warnings.append)
    texts = [*SENTENCES * 3, "ฝน"]
    kept = list(round_trips(iter(texts), {"source": tokenizers["bpe"], "target": tokenizers["unigram"]}))
    assert kept == texts[:-1]
    (warning,) = warnings
    assert warning.startswith("1 of 16 calibration texts were left out: the first is text 16, 'ฝน'")
    list(round_trips(SENTENCES, {"source": tokenizers["bpe"]}))
    assert len(warnings) == 1


def test_many_lost_texts_are_refused(tokenizers):
    def texts():
        yield from ["ฝน flood", *SENTENCES, "ฝน"] * 10
        raise AssertionError("it is clear before the last text")

    sides = {"source": tokenizers["bpe"], "target": tokenizers["unigram"]}
    with pytest.raises(CalibrationError, match="of 21 texts.*text 1, 'ฝน flood', of which the target's tokenizer"):
        list(round_trips(texts(), sides))
    with pytest.raises(CalibrationError, match="1 of 1 texts"):
        list(round_trips(["ฝน"], sides))


def test_token_ids_are_passed_on(tokenizers):
    assert list(round_trips([[1, 2], [3]], {"target": tokenizers["unigram"]})) == [[1, 2], [3]]

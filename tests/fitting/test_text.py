import builtins

import pytest

from hf_kvtransfer import CalibrationError
from hf_kvtransfer.fitting.text import CHUNK_LENGTH, calibration_texts


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "source": "x"}\n{"text": "two\\nlines"}\n', encoding="utf-8")
    assert list(calibration_texts(path)) == list(calibration_texts(str(path))) == ["one", "two\nlines"]
    path.write_text('{"text": "one"}\n{"txt": "two"}\n', encoding="utf-8")
    with pytest.raises(CalibrationError, match="Line 2 of"):
        list(calibration_texts(path))


def test_plain_text_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    paragraphs = [f"Paragraph {i}. " + "word " * 150 + "\n\n" for i in range(9)]
    path.write_text("".join(paragraphs), encoding="utf-8")
    chunks = list(calibration_texts(path))
    assert "".join(chunks) == "".join(paragraphs)
    assert len(chunks) > 1
    assert all(len(chunk) >= CHUNK_LENGTH for chunk in chunks[:-1])
    assert all(chunk.lstrip().startswith("Paragraph") for chunk in chunks)


def test_iterables_are_taken_as_they_are():
    texts = ["a", "b"]
    assert calibration_texts(texts) is texts


def test_a_dataset_needs_datasets(monkeypatch):
    real = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(CalibrationError, match="'org/corpus'` is no file.*pip install datasets"):
        list(calibration_texts("org/corpus"))

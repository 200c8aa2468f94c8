import builtins
import json
import sys
import types

import pytest

from hf_kvtransfer import CalibrationError
from hf_kvtransfer.fitting.text import CHUNK_LENGTH, calibration_texts

from ..fidelity.test_chat import CHATML, DIALOGUE, STRICT, with_template


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


def test_iterables():
    assert list(calibration_texts(["a", "b"])) == ["a", "b"]
    assert list(calibration_texts(iter([{"text": "a"}, "b"]))) == ["a", "b"]
    assert list(calibration_texts([[1, 2], (3, 4)])) == [[1, 2], (3, 4)]
    with pytest.raises(CalibrationError, match="Item 2 of `texts` must be .* got .*'title'"):
        list(calibration_texts([{"text": "a"}, {"title": "b"}]))


def test_dialogues_are_rendered(tokenizers, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": DIALOGUE}) + "\n" + json.dumps({"text": "one"}) + "\n", encoding="utf-8")
    templated = with_template(tokenizers["bpe"], CHATML)
    dialogue, text = calibration_texts(path, templated)
    assert dialogue.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat does")
    assert dialogue.endswith("<|im_start|>assistant\nFish.<|im_end|>\n")
    assert text == "one"
    plain = next(calibration_texts(path, tokenizers["bpe"]))
    assert plain.startswith("System: Be brief.\n\nUser: What does the delta give?\n\nTool: ")
    assert plain.endswith("Assistant: Fish.\n\n")
    # The tokenizer puts its BOS in front itself.
    assert next(calibration_texts(path, with_template(tokenizers["unigram"], STRICT))).startswith("<user>")
    with pytest.raises(CalibrationError, match="Line 1 of .* is a dialogue: pass `target_tokenizer`"):
        list(calibration_texts(path))
    with pytest.raises(CalibrationError, match="Item 1 of `texts`: message 1 has the unknown role"):
        list(calibration_texts([{"messages": [{"role": "oracle", "content": "x"}]}], templated))


def test_mixtures_keep_their_proportions(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 3000, encoding="utf-8")
    parts = [(str(path), 3), (["b"] * 1000, 1)]
    drawn = list(calibration_texts(parts, seed=1))
    # One of them has no more.
    assert drawn.count("a") == 3000 or drawn.count("b") == 1000
    assert drawn[:1200].count("b") / 1200 == pytest.approx(0.25, abs=0.04)
    assert drawn[9::10].count("b") / len(drawn[9::10]) == pytest.approx(0.25, abs=0.06)  # as what is held out
    assert drawn == list(calibration_texts(parts, seed=1)) != list(calibration_texts(parts, seed=2))
    assert list(calibration_texts({path: 1}))[:2] == ["a", "a"]
    for share in (0, -1, True, "1"):
        with pytest.raises(CalibrationError, match="must be a positive number"):
            list(calibration_texts({str(path): share}))


def test_the_default_is_a_sample_of_the_web(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return [{"text": "page", "url": "x"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(calibration_texts(None)) == ["page"]
    assert asked == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True})]


def test_a_dataset_needs_datasets(monkeypatch):
    real = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(CalibrationError, match="'org/corpus'` is no file.*pip install datasets"):
        list(calibration_texts("org/corpus"))

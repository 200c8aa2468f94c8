import hashlib
import json
import math
import os

import pytest
import torch

from hf_kvtransfer import EvaluationDataError, SourceKV
from hf_kvtransfer.fidelity.data import load_evaluation_data
from hf_kvtransfer.fidelity.rows import Choice, Question, ask_questions

from ..tiny_models import tiny_model
from .test_chat import CHATML, DIALOGUE, STRICT, with_template


LONG = "The river carries silt from the mountains down to the delta, where farmers wait for the flood. " * 4
SHORT = {"context_tokens": 12, "continuation_tokens": 5}


@pytest.fixture
def load(tokenizers):
    def load(data, source="bpe", target="unigram", **settings):
        return load_evaluation_data(data, tokenizers.get(source), tokenizers.get(target), **(SHORT | settings))

    return load


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only_passage(data):
    (document,) = data.documents
    (passage,) = document.passages
    return passage


@pytest.mark.parametrize("target", ["bpe", "unigram", "wordpiece"])
def test_text_is_cut_by_the_target_s_tokens(tokenizers, load, target):
    passage = only_passage(load([LONG], target=target))
    ids = tokenizers[target](LONG)["input_ids"]
    assert passage.target_ids == ids[:12]
    assert passage.continuations == [ids[12:17]]
    assert LONG.startswith(passage.source_text) and passage.source_ids is None
    # The source reads what the context's tokens stand for, not more.
    whole = LONG[: len(passage.source_text) + passage.characters[0]]
    assert tokenizers[target](passage.source_text)["input_ids"][:12] == ids[:12]
    assert tokenizers[target](whole)["input_ids"][:17] == ids[:17]
    assert passage.label == 0 and passage.turn is None


def test_texts_that_are_too_short_are_counted(load):
    data = load([{"text": "short"}, {"text": LONG}, ""])
    assert [document.key for document in data.documents] == ["iterable:2"]
    assert data.sources[0]["documents"] == 1
    assert data.sources[0]["skipped"] == {"shorter than 17 tokens": 2}
    with pytest.raises(EvaluationDataError, match="no row that can be used: 1 shorter than 17.*needs 17 tokens"):
        load(["short"])
    with pytest.raises(EvaluationDataError, match="1 with a context of more than 11 tokens"):
        load([LONG], max_length=11)


def test_explicit_contexts(tokenizers, load):
    row = {"context": "The farmers wait", "continuation": " for the flood.", "capability": "knowledge"}
    data = load([row], continuation_tokens=64)
    passage = only_passage(data)
    assert data.documents[0].capability == "knowledge"
    assert passage.source_text == row["context"]
    expected = tokenizers["unigram"](row["context"] + row["continuation"])["input_ids"]
    assert passage.target_ids + passage.continuations[0] == expected
    assert passage.characters == [len(row["continuation"])]
    assert len(only_passage(load([row], continuation_tokens=3)).continuations[0]) == 3
    with pytest.raises(EvaluationDataError, match="more than 2 tokens"):
        load([row], max_length=2)


def test_multiple_choice(tokenizers, load):
    rows = [
        {"context": "A man sits on a roof. he", "endings": ["waits.", ", waiting", " sings", "(sings)"], "label": 2},
        {"context": "Now: ", "endings": ["wait", "sing"], "label": 0},
    ]
    first, second = load(rows, continuation_tokens=64).documents
    assert first.capability == "choice"
    (passage,) = first.passages
    assert passage.label == 2 and len(passage.continuations) == 4
    assert passage.characters == [len(" waits."), len(", waiting"), len(" sings"), len(" (sings)")]
    context = rows[0]["context"]
    assert passage.target_ids + passage.continuations[0] == tokenizers["unigram"](f"{context} waits.")["input_ids"]
    assert second.passages[0].characters == [4, 4]


def test_questions_are_choices_among_the_answers_of_the_next_rows(tokenizers, load):
    rows = [{"question": f"How much is {i}?", "answer": f"It is {i}."} for i in (1, 2, 3, 3, 4)]
    data = load(rows, source="unigram", target="bpe", continuation_tokens=64)
    assert [document.passages[0].label for document in data.documents] == [0, 1, 2, 3, 0]
    assert {document.capability for document in data.documents} == {"reasoning"}
    texts = []
    for row, document in zip(rows, data.documents, strict=True):
        (passage,) = document.passages
        assert passage.source_text == f"Question: {row['question']}\nAnswer:"
        decoded = [tokenizers["bpe"].decode(passage.target_ids + ids) for ids in passage.continuations]
        texts.append([text.partition("Answer:")[2].strip() for text in decoded])
        assert texts[-1][passage.label] == row["answer"]
    assert texts[0] == ["It is 1.", "It is 2.", "It is 3.", "It is 4."]
    assert texts[4] == ["It is 4.", "It is 1.", "It is 2.", "It is 3."]
    # Too few different answers to choose among.
    assert [len(document.passages[0].continuations) for document in load(rows[:4]).documents] == [1] * 4


def wrong_answers(answers, place):
    """By the definition: from a question's own place on, and around."""
    after = dict.fromkeys(answers[place:] + answers[:place])
    return [answer for answer in after if answer != answers[place]][:3]


@pytest.mark.parametrize("answers", ["abcdefg", "aabbccddeeaa", "aaaabcdaaaa", "bacabadabacaba", "abcd"])
def test_wrong_answers_are_the_next_that_differ(answers):
    rows = [(number, Question("reasoning", "Which?", answer)) for number, answer in enumerate(answers)]
    for place, (number, row) in enumerate(ask_questions(rows)):
        assert (number, row.label) == (place, place % 4)
        expected = [f" {answer}" for answer in wrong_answers(answers, place)]
        assert row.endings == [*expected[: row.label], f" {answers[place]}", *expected[row.label :]]


@pytest.mark.parametrize("rare", ["", "cd"])
def test_many_questions_with_few_answers(rare):
    answers = "ab" * 10_000 + rare
    rows = [(number, Question("reasoning", "Yes or no?", answer)) for number, answer in enumerate(answers)]
    choices = [row for _, row in ask_questions(rows)]
    assert {len(row.endings) for row in choices} == {4 if rare else 1}
    endings = [" a", " b", " c", " d"] if rare else [" a"]
    assert choices[0] == Choice("reasoning", "Question: Yes or no?\nAnswer:", endings)


def test_a_question_is_read_behind_its_context(tokenizers, load):
    rows = [{"context": LONG, "question": f"How much is {i}?", "answer": f"It is {i}."} for i in range(4)]
    rows += [{"context": "", "question": "How much is 4?", "answer": "It is 4."}]
    *data, last = load(rows, continuation_tokens=64).documents
    for i, document in enumerate(data):
        (passage,) = document.passages
        assert document.capability == "reasoning" and len(passage.continuations) == 4
        assert passage.source_text == f"{LONG}\n\nQuestion: How much is {i}?\nAnswer:"
        assert passage.target_ids == tokenizers["unigram"](passage.source_text)["input_ids"]
    assert last.passages[0].source_text == "Question: How much is 4?\nAnswer:"
    with pytest.raises(EvaluationDataError, match="5 with a context of more than 5 tokens"):
        load(rows, max_length=5)
    with pytest.raises(
        EvaluationDataError, match="Row 1 of `data`: `context` must be a text that is not empty, got 3"
    ):
        load([rows[0] | {"context": 3}])


@pytest.mark.parametrize("row", [[*range(3, 30)], torch.arange(3, 30), {"input_ids": (*range(3, 30),)}])
def test_token_ids_need_no_tokenizer(load, row):
    passage = only_passage(load([row], source=None, target=None))
    assert passage.source_ids == passage.target_ids == [*range(3, 15)]
    assert passage.source_text is None
    assert passage.continuations == [[*range(15, 20)]] and passage.characters == [5]
    assert only_passage(load([row], source="bpe", target="bpe")) == passage
    with pytest.raises(EvaluationDataError, match="Row 1 of `data`: .*tokenizers differ"):
        load([row], source="bpe", target="unigram")


def test_turns_of_a_dialogue(tokenizers):
    source = with_template(tokenizers["bpe"], CHATML)
    target = with_template(tokenizers["unigram"], STRICT)
    data = load_evaluation_data([{"messages": DIALOGUE}], source, target, continuation_tokens=100)
    (document,) = data.documents
    assert document.capability == "dialogue"
    assert [passage.turn for passage in document.passages] == [1, 2]
    first, second = document.passages
    as_served = source.apply_chat_template(DIALOGUE[:3], add_generation_prompt=True, return_dict=False)
    assert source(first.source_text)["input_ids"] == as_served
    for passage in (first, second):
        assert passage.target_ids.count(target.bos_token_id) == 1
        text = target.decode(passage.target_ids)
        for message in DIALOGUE[:2]:
            assert message["content"] in passage.source_text and message["content"] in text
    # Each turn goes on where the last one stopped, with the reply in between.
    assert second.source_text.startswith(first.source_text + "It gives silt.")
    grown = first.target_ids + first.continuations[0]
    assert second.target_ids[: len(grown)] == grown


def test_a_source_reads_one_bos(tokenizers):
    source = with_template(tokenizers["unigram"], STRICT)
    data = load_evaluation_data([{"messages": DIALOGUE}], source, tokenizers["bpe"])
    kv = SourceKV.prefill(tiny_model("llama"), source, data.documents[0].passages[-1].source_text)
    assert kv.input_ids[0].tolist().count(source.bos_token_id) == 1
    assert kv.input_ids[0, 0] == source.bos_token_id


def test_turns_that_are_left_out(tokenizers, load):
    greeting = [{"role": "assistant", "content": "Hello."}, *DIALOGUE[1:]]
    data = load([{"messages": greeting}])
    assert [passage.turn for passage in data.documents[0].passages] == [2, 3]
    assert data.sources[0]["skipped"] == {"turns with nothing before them": 1}
    second_context = len(data.documents[0].passages[1].target_ids)
    data = load([{"messages": greeting}], max_length=second_context - 1)
    assert [passage.turn for passage in data.documents[0].passages] == [2]
    assert data.sources[0]["skipped"][f"turns with a context of more than {second_context - 1} tokens"] == 1
    with pytest.raises(EvaluationDataError, match="no row that can be used.*1 dialogues with no other turns"):
        load([{"messages": greeting[:1]}])


def test_files_and_capabilities(tmp_path, load):
    rows = [{"text": LONG, "capability": "code"}, {"text": LONG}, {"messages": DIALOGUE}]
    path = write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "other").mkdir()
    twin = write(tmp_path / "other" / "rows.jsonl", rows[:1])
    plain = tmp_path / "notes.txt"
    plain.write_text(f"{LONG}\n\n" * 3, encoding="utf-8")

    data = load(str(path))
    assert [document.capability for document in data.documents] == ["code", "text", "dialogue"]
    assert [document.key for document in data.documents] == [f"rows.jsonl:{line}" for line in (1, 2, 3)]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.sources == [{"name": "rows.jsonl", "sha256": digest, "documents": 3, "skipped": {}}]

    data = load([path, str(twin), plain])
    assert [source["documents"] for source in data.sources] == [3, 1, 3]
    assert len({document.key for document in data.documents}) == 7
    assert [source["name"] for source in data.sources] == ["rows.jsonl", "rows.jsonl (2)", "notes.txt"]

    data = load({"mine": path, "theirs": [LONG], "both": [path, twin]})
    capabilities = [document.capability for document in data.documents]
    assert capabilities == ["code", "mine", "mine", "theirs", "code", "both", "both", "code"]
    assert len({document.key for document in data.documents}) == 8


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path, load):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f"\ufeff{json.dumps(LONG)}\n\n{json.dumps({'text': LONG, 'messages': None})}\n\n", encoding="utf-8"
    )
    assert [document.key for document in load(path).documents] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_rows_have_a_digest(load):
    digests = [load(rows).sources[0]["sha256"] for rows in ([LONG], iter([{"text": LONG}]), [LONG, LONG])]
    assert digests[0] == digests[1] != digests[2]
    row = {"question": "Why?", "answer": "So."}
    # Of what a row says, not of what a later version also reads.
    expected = hashlib.sha256(json.dumps({"answer": "So.", "capability": "reasoning", "question": "Why?"}).encode())
    expected.update(b"\n")
    digests = [load([row | more]).sources[0]["sha256"] for more in ({}, {"context": ""}, {"context": LONG})]
    assert expected.hexdigest() == digests[0] == digests[1] != digests[2]


def test_a_limit_is_spread_over_the_data(load):
    rows = [LONG if i % 2 else "short" for i in range(20)]
    data = load(rows, limit=5)
    assert [document.key for document in data.documents] == [f"iterable:{line}" for line in (2, 6, 10, 14, 18)]
    assert len(load(rows, limit=100).documents) == 10
    data = load({"a": rows, "b": rows}, limit=2)
    assert [source["documents"] for source in data.sources] == [2, 2]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "message 1 has the unknown role 'bot'.*system, user"),
        ({"messages": [*DIALOGUE, {"role": "user", "content": " \n"}]}, r"message 7 \(role 'user'\) is empty"),
        (
            {"messages": [*DIALOGUE, {"role": "assistant", "content": None}]},
            r"message 7 \(role 'assistant'\) is empty",
        ),
        ({"messages": [*DIALOGUE, {"role": "user", "content": ["Hi"]}]}, "message 7 .*`content` must be a string"),
        ({"messages": [*DIALOGUE, {"role": "user"}]}, "message 7 must have a `role` and a `content`"),
        ({"messages": DIALOGUE[:3]}, "no message of the assistant"),
        ({"messages": DIALOGUE * 2}, "message 7 has the role 'system', with which a dialogue begins"),
        ({"messages": []}, "`messages` must be a list"),
        ({"category": "writing", "turns": ["Write.", "Again."]}, r"MT-Bench.*\"messages\".*with the replies"),
        ({"prompt": "Hi"}, r"fields \['prompt'\] is of no known kind.*\"text\".*\"messages\".*\"endings\""),
        ({"text": None}, "no known kind"),
        ({"text": 3}, "`text` must be a string"),
        (None, "type NoneType is of no known kind"),
        (3.5, "type float is of no known kind"),
        ({"context": "A", "endings": ["b", "c"], "label": 2}, "number from 0 to 1, got 2"),
        ({"context": "A", "endings": ["b", "c"], "label": -1}, "got -1"),
        ({"context": "A", "endings": ["b", "c"], "label": "1"}, "got '1'"),
        ({"context": "A", "endings": ["b", "c"], "label": True}, "got True"),
        ({"context": "A", "endings": ["b"], "label": 0}, "at least 2"),
        ({"context": "A", "endings": ["b", " "], "label": 0}, r"`endings\[1\]` must be a text"),
        ({"context": " ", "continuation": "b"}, "`context` must be a text"),
        ({"question": "Why?", "answer": ""}, "`answer` must be a text"),
        ([1, 2, math.nan], "number 2 is nan"),
        ([1.0, 2.0], "number 0 is 1.0"),
        ([1, -2], "number 1 is -2"),
        (["a", "b"], "number 0 is 'a'"),
        ({"input_ids": [[1, 2], [3, 4]]}, "one dimension"),
        ({"input_ids": 7}, "list or a tensor"),
        ({"text": LONG, "capability": 3}, "`capability` must be a name, got 3"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, load, row, message):
    path = write(tmp_path / "rows.jsonl", [{"text": LONG}, row])
    with pytest.raises(EvaluationDataError, match=f"Line 2 of .*rows.jsonl: .*{message}"):
        load(path, limit=1)
    with pytest.raises(EvaluationDataError, match=f"Row 2 of `data`: .*{message}"):
        load([LONG, row])


def test_files_that_cannot_be_used(tmp_path, load):
    with pytest.raises(EvaluationDataError, match="no file .*missing.jsonl"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(EvaluationDataError, match="no file missing.jsonl"):
        load(["missing.jsonl"])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": ', encoding="utf-8")
    with pytest.raises(EvaluationDataError, match="Line 2 of .*rows.jsonl is not JSON"):
        load(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(EvaluationDataError, match="cannot be read as UTF-8"):
        load(path)
    path.write_text("")
    with pytest.raises(EvaluationDataError, match="rows.jsonl has no row that can be used"):
        load(path)


def test_a_text_is_no_file(load):
    for text in (LONG * 20, "Rain fell. " + LONG[:50] + "\nIt stopped."):
        with pytest.raises(EvaluationDataError, match="no file '.*'[.][.][.].* give a list of rows") as raised:
            load(text)
        assert len(str(raised.value)) < 300
        assert load([LONG, text + LONG]).sources[0]["documents"] == 2
    # A name that exists nowhere is shown as it is, however deep its folder.
    with pytest.raises(EvaluationDataError, match=f"no file {'folder/' * 20}missing.jsonl"):
        load(os.path.join(*["folder"] * 20, "missing.jsonl"))


@pytest.mark.parametrize("row", [{"text": LONG}, [1, 2, 3], None])
def test_files_and_rows_in_one_list(tmp_path, load, row):
    path = write(tmp_path / "rows.jsonl", [{"text": LONG}])
    for data in ([path, row], [str(path), row]):
        with pytest.raises(EvaluationDataError, match=r"Item 2 of `data` is a row \(\w+\) among files.*apart"):
            load(data)
    with pytest.raises(EvaluationDataError, match="no file 'The river.* without files among them"):
        load([path, LONG])


def test_data_of_another_type(load):
    for data in (None, 3, {"a": {"text": LONG}}, {"a": 3}):
        with pytest.raises(EvaluationDataError, match="must be a file, a list of files, rows"):
            load(data)
    with pytest.raises(EvaluationDataError, match="names of capabilities, got 3"):
        load({3: [LONG]})
    for data in ({}, {"text": []}, []):
        with pytest.raises(EvaluationDataError, match="is empty|no row that can be used"):
            load(data)
    with pytest.raises(EvaluationDataError, match="Row 1 of `data`: a row of type int"):
        load([1, 2, 3])


def test_a_template_s_refusal_names_the_row(tokenizers):
    target = with_template(tokenizers["unigram"], STRICT)
    rows = [{"messages": [{"role": "assistant", "content": "Hello."}, *DIALOGUE[1:]]}]
    with pytest.raises(EvaluationDataError, match="Row 1 of `data`: the chat template of"):
        load_evaluation_data(rows, tokenizers["bpe"], target)


def test_text_needs_tokenizers(load):
    for missing in ({"source": None}, {"target": None}):
        with pytest.raises(EvaluationDataError, match="Row 1 of `data`: text needs both `source_tokenizer` and"):
            load([LONG], **missing)


@pytest.mark.parametrize(
    "settings", [{"context_tokens": 1}, {"continuation_tokens": 0}, {"max_length": 1}, {"limit": 0}]
)
def test_settings_that_cannot_be_used(load, settings):
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must be at least"):
        load([LONG], **settings)

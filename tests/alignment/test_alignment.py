import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from hf_kvtransfer.alignment import TokenAlignment, align_tokens
from hf_kvtransfer.alignment.spans import _decoded_spans, character_spans, encode_with_spans
from hf_kvtransfer.errors import AlignmentError

from ..tiny_tokenizers import SENTENCES, TEXTS, byte_level_bpe


def align(source, source_text, target, target_text):
    _, source_spans = encode_with_spans(source, source_text)
    _, target_spans = encode_with_spans(target, target_text)
    return align_tokens(source_text, source_spans, target_text, target_spans), source_spans, target_spans


def reference(source_spans, target_spans, read):
    """Token by token, for a source that has read the first `read` characters of the target's text."""
    index, aligned, exact = [], [], []
    for start, end in target_spans:
        place = min(end, read) - 1
        before = [i for i, (first, last) in enumerate(source_spans) if first <= place and last > first]
        chosen = before[-1] if before else 0
        index.append(chosen)
        aligned.append(bool(end <= read and before and source_spans[chosen][1] > start))
        exact.append(aligned[-1] and source_spans[chosen][1] == end)
    return index, aligned, exact


@st.composite
def pieces(draw, length):
    """Spans over a text: ordinary tokens, and characters that several tokens share."""
    spans, at = [], 0
    while at < length:
        end = min(length, at + draw(st.integers(1, 4)))
        spans.append((at, end))
        spans += [(end - 1, end)] * draw(st.sampled_from([0, 0, 0, 1, 2]))
        at = end
    return spans


# NVIDIA/TensorRT-LLM#18389
@settings(deadline=None, max_examples=80, derandomize=True)
@given(data=st.data())
def test_matches_a_token_by_token_reference(data):
    text = data.draw(st.text(min_size=1, max_size=24))
    read = data.draw(st.integers(1, len(text)))
    source_spans, target_spans = data.draw(pieces(read)), data.draw(pieces(len(text)))
    alignment = align_tokens(text[:read], source_spans, text, target_spans)
    index, aligned, exact = reference(source_spans, target_spans, read)
    assert alignment.source_index.tolist() == index
    assert alignment.aligned.tolist() == aligned
    assert alignment.exact.tolist() == exact
    assert index == sorted(index)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data())
def test_source_index_never_decreases(data):
    words = st.lists(st.sampled_from(["<bos>", "river ", "delta ", "flood\n", "🎉", "user: ", " "]), max_size=30)
    before, shared, behind = ("".join(data.draw(words)) for _ in range(3))
    source_text, target_text = before + "What is it?" + shared, "What is it?" + shared + behind
    bos = data.draw(st.sampled_from([[], [(0, 0)]]))
    source_spans = bos + data.draw(pieces(len(source_text))) + [(0, 0)]
    target_spans = [(0, 0)] + data.draw(pieces(len(target_text))) + bos
    alignment = align_tokens(source_text, source_spans, target_text, target_spans)
    assert (alignment.source_index.diff() >= 0).all()
    assert alignment.source_index.min() >= 0 and alignment.source_index.max() < len(source_spans)


@pytest.mark.parametrize("name", ["bpe", "unigram", "wordpiece"])
def test_a_tokenizer_is_aligned_with_itself(tokenizers, name):
    for text in SENTENCES:
        alignment, spans, _ = align(tokenizers[name], text, tokenizers[name], text)
        assert alignment.coverage == 1.0
        # Pieces of one character listen to the last piece, which may go on behind it; all others to themselves.
        for i, (start, end) in enumerate(spans):
            sharing = [j for j, (first, last) in enumerate(spans) if first < end <= last and start < end]
            assert alignment.source_index[i] == (sharing[-1] if sharing else i)
    text = SENTENCES[0]
    assert align(tokenizers[name], text, tokenizers[name], text)[0].is_identity or name == "unigram"


# NVIDIA/TensorRT-LLM#18389
@pytest.mark.parametrize("source", ["bpe", "unigram", "wordpiece"])
@pytest.mark.parametrize("target", ["bpe", "unigram", "wordpiece"])
def test_a_cut_source_speaks_for_no_token_behind_the_cut(tokenizers, source, target):
    for text in TEXTS[1:6]:
        for cut in range(1, len(text) + 1):
            if not encode_with_spans(tokenizers[source], text[:cut])[0]:
                continue
            alignment, source_spans, target_spans = align(tokenizers[source], text[:cut], tokenizers[target], text)
            assert (alignment.source_index.diff() >= 0).all()
            assert alignment.last_aligned < 0 or target_spans[alignment.last_aligned][1] <= cut
            for i in alignment.aligned.nonzero().flatten().tolist():
                chosen = source_spans[alignment.source_index[i]]
                assert chosen[1] > target_spans[i][0] or chosen[0] == chosen[1]


def test_all_pieces_of_a_character_listen_to_the_last_source_piece():
    source, target = [(0, 2), (1, 2), (1, 2), (2, 3)], [(0, 1), (1, 2), (1, 2), (2, 3)]
    alignment = align_tokens(" 🎉!", source, " 🎉!", target)
    assert alignment.source_index.tolist() == [0, 2, 2, 3]
    assert alignment.exact.tolist() == [False, True, True, True]
    assert align_tokens(" 🎉!", target, " 🎉!", [(0, 3)]).source_index.tolist() == [3]


def test_beginnings_and_ends_without_text():
    text, spans = "a b", [(0, 1), (1, 3)]
    with_bos = align_tokens(text, spans, text, [(0, 0), *spans])
    assert with_bos.source_index.tolist() == [0, 0, 1]
    assert with_bos.aligned.tolist() == [False, True, True]
    assert with_bos.coverage == 1.0 and not with_bos.is_identity
    assert align_tokens(text, [(0, 0), *spans], text, spans).source_index.tolist() == [1, 2]
    both = [(0, 0), (0, 0), *spans, (0, 0)]
    assert align_tokens(text, both, text, both).is_identity
    longer = align_tokens(text, [*spans, (0, 0)], text + " c", [*spans, (3, 5), (0, 0)])
    assert longer.source_index.tolist() == [0, 1, 2, 2] and longer.last_aligned == 1


def test_normalized_text_keeps_its_own_characters(tokenizers):
    text = "CAFÉ ﬁne, the FLOOD"
    alignment, source_spans, target_spans = align(tokenizers["wordpiece"], text, tokenizers["bpe"], text)
    # The source does not read spaces.
    spaces = torch.tensor([text[start:end] == " " for start, end in target_spans])
    assert torch.equal(alignment.aligned, ~spaces)
    assert source_spans[alignment.source_index[-1]][1] == target_spans[-1][1] == len(text)
    # The source drops an accent that is a character of its own; the token that ends in it is still about the word.
    assert align_tokens(
        "cafe\u0301 x", [(0, 4), (6, 7)], "cafe\u0301 x", [(0, 5), (5, 6), (6, 7)]
    ).aligned.tolist() == [
        True,
        False,
        True,
    ]


# guoqingbao/xinfer#277
def test_templates_around_the_same_contents(tokenizers):
    turns = [SENTENCES[0], SENTENCES[4], "Tell me more about the silt, please."]
    source_text = "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)
    target_text = "<bos>" + "".join(f"[INST] {turn} [/INST]" for turn in turns) + "\nAnd the fish?"
    alignment, source_spans, target_spans = align(tokenizers["bpe"], source_text, tokenizers["unigram"], target_text)
    assert (alignment.source_index.diff() >= 0).all()
    inside = torch.zeros(len(target_text), dtype=torch.bool)
    for turn in turns:
        inside[target_text.index(turn) :][: len(turn)] = True
    for i, (start, end) in enumerate(target_spans):
        if start < end and inside[start:end].all():
            assert alignment.aligned[i]
            chosen = source_spans[alignment.source_index[i]]
            assert target_text[end - 1] in source_text[slice(*chosen)]
        elif start < end and not inside[start:end].any():
            assert not alignment.aligned[i]
    assert target_spans[alignment.last_aligned][1] == target_text.index(turns[-1]) + len(turns[-1])


def test_a_short_common_ending_is_a_coincidence():
    source, target = "I read a book.", "I read a newspaper."
    alignment = align_tokens(source, [(i, i + 1) for i in range(14)], target, [(i, i + 1) for i in range(19)])
    assert alignment.last_aligned == len("I read a ") - 1


def test_a_short_text_behind_a_template_is_found():
    alignment = align_tokens("hi", [(0, 2)], "<bos>hi", [(0, 5), (5, 7)])
    assert alignment.aligned.tolist() == [False, True]


def test_long_texts_that_differ_take_no_quadratic_time():
    rng = random.Random(0)
    words = [f"{rng.choice(['the', 'a', 'of'])} word{rng.randrange(500)} " for _ in range(10_000)]
    text = "".join(words)
    source_text, target_text = f"<|im_start|>{text}<|im_end|>", f"<start_of_turn>{text}<end_of_turn>"
    source_spans = [(i, min(i + 3, len(source_text))) for i in range(0, len(source_text), 3)]
    target_spans = [(i, min(i + 4, len(target_text))) for i in range(0, len(target_text), 4)]
    assert align_tokens(source_text, source_spans, target_text, target_spans).coverage > 0.999


@pytest.mark.parametrize(("source", "target"), [("abc", "xyz"), ("", "xyz")])
def test_nothing_in_common_is_refused(source, target):
    with pytest.raises(AlignmentError, match="no text in common"):
        align_tokens(source, [(0, len(source))], target, [(0, 3)])


def test_empty_and_identity():
    empty = align_tokens("abc", [(0, 3)], "", [])
    assert len(empty.source_index) == 0 and empty.last_aligned == -1 and empty.coverage == 1.0
    assert TokenAlignment.identity(3).is_identity and TokenAlignment.identity(3).last_aligned == 2


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_character_spans_of_ids(tokenizers, name):
    tokenizer = tokenizers[name]
    for text in SENTENCES + TEXTS:
        for special in (True, False):
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            decoded, spans = character_spans(tokenizer, encoding["input_ids"])
            assert len(spans) == len(encoding["input_ids"]) and spans == sorted(spans)
            if decoded == text:
                assert spans == [tuple(span) for span in encoding["offset_mapping"]]
            # Only a tokenizer that normalises, or takes a leading space for its own, loses anything.
            assert decoded == text or (name == "unigram" and (text in TEXTS))


# raullenchai/Rapid-MLX#1449, mlc-ai/mlc-llm#3179
def test_character_spans_of_sampled_ids(tokenizers):
    tokenizer = tokenizers["bpe"]
    text = "The farmers 🎉 wait<|im_end|>\n日本語 👩‍👩‍👧 " * 4
    usual = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert _decoded_spans(tokenizer, usual["input_ids"]) == (text, [tuple(s) for s in usual["offset_mapping"]])
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    sampled = tokenizer.convert_tokens_to_ids(list(alphabet))
    decoded, spans = character_spans(tokenizer, sampled)
    assert decoded == text
    expected = [(at, at + 1) for at, character in enumerate(text) for _ in character.encode()]
    assert spans == expected
    target, target_spans = character_spans(tokenizer, usual["input_ids"])
    alignment = align_tokens(decoded, spans, target, target_spans)
    assert alignment.coverage == alignment.boundary_share == 1.0


def test_character_spans_of_a_generation_that_stops_inside_a_character(tokenizers):
    tokenizer = tokenizers["bpe"]
    ids = tokenizer("flood 🎉", add_special_tokens=False)["input_ids"]
    text, spans = character_spans(tokenizer, ids[:-1])
    assert text.startswith("flood ") and len(spans) == len(ids) - 1
    assert character_spans(tokenizer, []) == ("", [])
    noise = tokenizer.convert_tokens_to_ids(["ŀ"]) * 200
    text, spans = character_spans(tokenizer, noise)
    assert len(spans) == 200 and spans == sorted(spans) and spans[-1][1] <= len(text)


def test_added_tokens_inside_a_text_are_text(tokenizers):
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    text = "<|im_start|>user\nuse<tool> now<|im_end|>"
    decoded, spans = character_spans(tokenizer, tokenizer(text)["input_ids"])
    assert decoded == text and "<tool>" in [text[start:end] for start, end in spans]

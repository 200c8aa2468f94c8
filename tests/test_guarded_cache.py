"""Calls that go silently wrong with stock transformers: an error that says so, or right."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

import hf_kvtransfer
from hf_kvtransfer import BatchMismatchError, FidelityGate, PrefixMismatchError, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument

from .tiny_models import identity_mapper, random_ids, ungated_cache


CONTEXT = 45


@pytest.fixture
def ids(llama):
    return random_ids(llama, 2, CONTEXT + 6)


def translated(model, ids, mask=None, **options):
    return ungated_cache(
        SourceKV.prefill(model, None, ids, attention_mask=mask), identity_mapper(model), model, **options
    )


def forgiving(model, ids, **options):
    """A cache that is left empty where the others raise."""
    source_kv = SourceKV.prefill(model, None, ids)
    return TranslatedCache(source_kv, identity_mapper(model), model, gate=FidelityGate(strict=False), **options)


def generate(model, ids, cache=None, **options):
    """Sequences and logits, without a check of the prompt."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False} | options
    if cache is not None:
        options[cache_argument(model)] = cache
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return output.sequences, torch.stack(output.logits)


def assert_native(model, ids, arguments):
    arguments = dict(arguments)
    arguments.pop("input_ids")
    found = generate(model, ids, **arguments)
    native = generate(model, ids)
    assert torch.equal(found[0], native[0])
    torch.testing.assert_close(found[1], native[1], rtol=0, atol=2e-5)


# transformers#36151, transformers#40906
@pytest.mark.parametrize("prompt_length", [CONTEXT, CONTEXT - 1, 25])
def test_a_cache_as_long_as_the_prompt_or_longer(llama, ids, prompt_length):
    cache = translated(llama, ids[:, :CONTEXT], tail_tokens=0)
    prompt = ids[:, :prompt_length]
    with pytest.raises(PrefixMismatchError, match=f"{prompt_length} tokens and a cache that stands for {CONTEXT}"):
        generate(llama, prompt, cache)
    # Nothing has happened yet.
    assert cache.get_seq_length() == CONTEXT
    arguments = cache.prepare({"input_ids": prompt})
    assert cache.get_seq_length() == prompt_length - 1
    assert cache.report.translated_tokens == 2 * (prompt_length - 1 - 4)
    assert_native(llama, prompt, arguments)
    assert cache.report.outcome == "translated"


# transformers#35707
def test_embeddings_as_many_as_the_cache(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT], tail_tokens=0)
    embeddings = llama.get_input_embeddings()(ids[:, :CONTEXT]).detach()
    with pytest.raises(PrefixMismatchError, match="none is left to read"):
        llama.generate(inputs_embeds=embeddings, max_new_tokens=2, **{cache_argument(llama): cache})
    arguments = cache.prepare({"inputs_embeds": embeddings})
    found = llama.generate(**arguments, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, generate(llama, ids[:, :CONTEXT])[0][:, CONTEXT : CONTEXT + 3])


# kubernetes-sigs/inference-perf#491, ml-explore/mlx-lm#138, huggingface-llama-recipes#79
@pytest.mark.parametrize("column", [8, 30, CONTEXT - 2])
def test_a_prompt_that_diverges_is_read_from_there_on(llama, ids, column, caplog):
    prompt = ids.clone()
    prompt[1, column] = 3 + (prompt[1, column] - 2) % 390
    cache = translated(llama, ids[:, :CONTEXT])
    arguments = cache.prepare({"input_ids": prompt, "attention_mask": torch.ones_like(prompt)})
    assert cache.get_seq_length() == column
    assert cache.report.translated_tokens == 2 * (column - 4)
    assert cache.report.held_back_tokens == 2 * (CONTEXT - column)
    assert_native(llama, prompt, arguments)


@pytest.mark.parametrize("column", [0, 3])
def test_a_prompt_with_nothing_translated_in_common(llama, ids, column):
    prompt = ids.clone()
    prompt[1, column:] = random_ids(llama, 1, CONTEXT + 6 - column, seed=7)
    with pytest.raises(
        PrefixMismatchError, match=f"row 1 of the prompt has token {prompt[1, column]} at column {column}"
    ):
        translated(llama, ids[:, :CONTEXT]).prepare({"input_ids": prompt})
    cache = forgiving(llama, ids[:, :CONTEXT])
    assert_native(llama, prompt, cache.prepare({"input_ids": prompt}))
    assert cache.report.outcome == "recomputed"
    assert f"at column {column}" in cache.report.reasons[0]


def test_new_tokens_without_a_mask(llama, ids):
    new = ids[:, CONTEXT - 1 :]
    cache = translated(llama, ids[:, :CONTEXT])
    with pytest.raises(PrefixMismatchError, match="or new tokens with an `attention_mask` of all tokens"):
        generate(llama, new, cache)
    with pytest.raises(PrefixMismatchError, match="begins with nothing that was translated"):
        cache.prepare({"input_ids": new})


def test_new_tokens_with_the_mask_of_all(llama, ids):
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"input_ids": ids * mask, "attention_mask": mask}
    cache = translated(llama, (ids * mask)[:, :CONTEXT], mask[:, :CONTEXT])
    held = cache.get_seq_length()
    new = {"input_ids": ids[:, held:], "attention_mask": mask}
    with pytest.raises(PrefixMismatchError, match="must begin with `cache.attention_mask`"):
        cache.prepare(new | {"attention_mask": torch.ones_like(mask)})
    first = hf_kvtransfer.generate(llama, new, cache, max_new_tokens=4, do_sample=False)
    native = llama.generate(**options, max_new_tokens=4, do_sample=False)
    assert torch.equal(first[:, -4:], native[:, -4:])
    # What was read is known, as if the whole prompt had been given.
    assert torch.equal(cache.input_ids, native[:, :-1])
    with pytest.raises(BatchMismatchError, match="`attention_mask` has shape"):
        cache.prepare({"input_ids": ids, "attention_mask": mask[:, 1:]})


TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}"


# vllm#27515, sglang#888, open-r1#462, deepseek-ai/DeepSeek-R1#151, allenai/reward-bench#164, unslothai/unsloth#10312
@pytest.mark.parametrize("wrong", ["twice", "missing"])
def test_a_bos_too_many_or_too_few_after_a_chat_template(llama, tokenizers, wrong):
    tokenizer = copy.deepcopy(tokenizers["unigram"])
    tokenizer.chat_template = TEMPLATE
    text = "The farmers wait for the flood. What does the delta give the farmers? It gives them silt, water and fish."
    right = tokenizer(text, return_tensors="pt").input_ids
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    if wrong == "twice":
        prompt = tokenizer(rendered, return_tensors="pt").input_ids
        assert prompt[0, :2].tolist() == [tokenizer.bos_token_id] * 2
    else:
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    cache = forgiving(llama, right)
    assert_native(llama, prompt, cache.prepare({"input_ids": prompt}))
    assert cache.report.outcome == "recomputed"
    expected = (
        "twice: a chat template and the tokenizer" if wrong == "twice" else f"lacks the first token, {right[0, 0]}"
    )
    assert expected in cache.report.reasons[0]


# raullenchai/Rapid-MLX#1449, mlc-ai/mlc-llm#3179
def test_sampled_ids_that_are_tokenized_otherwise_when_read_again(llama, tokenizers):
    tokenizer = tokenizers["bpe"]
    context = tokenizer("What does the delta give the farmers? ", return_tensors="pt").input_ids
    word = "water"
    pieces = [tokenizer(letter).input_ids[0] for letter in word]
    sampled = iter(pieces)
    cache = translated(llama, context)
    sequences = hf_kvtransfer.generate(
        llama,
        {"input_ids": context},
        cache,
        prefix_allowed_tokens_fn=lambda batch, ids: [next(sampled)],
        max_new_tokens=len(word),
    )
    assert sequences[0, -len(word) :].tolist() == pieces
    text = tokenizer.decode(sequences[0]) + " and fish"
    prompt = tokenizer(text, return_tensors="pt").input_ids
    assert prompt.shape[1] < sequences.shape[1] + len(" and fish")
    arguments = cache.prepare({"input_ids": prompt})
    common = int((prompt[0, : context.shape[1]] == context[0]).long().cumprod(0).sum())
    assert cache.get_seq_length() == common < sequences.shape[1] - 1
    assert_native(llama, prompt, arguments)


# transformers#38727, NVIDIA/kvpress#154
def test_five_turns(gemma):
    cache = translated(gemma, random_ids(gemma, 1, CONTEXT))
    prompt = torch.cat([random_ids(gemma, 1, CONTEXT), random_ids(gemma, 1, 3, seed=1)], 1)
    for turn in range(5):
        sequences = hf_kvtransfer.generate(gemma, {"input_ids": prompt}, cache, max_new_tokens=4, do_sample=False)
        assert torch.equal(sequences, generate(gemma, prompt)[0])
        # The answer stays in the cache: NVIDIA/kvpress#154.
        assert cache.get_seq_length() == sequences.shape[1] - 1
        prompt = torch.cat([sequences, random_ids(gemma, 1, 3, seed=turn + 2)], 1)
    assert cache.report.outcome == "translated"


def test_what_plain_generate_has_read_must_be_told(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT])
    sequences, _ = generate(llama, ids, cache)
    prompt = torch.cat([sequences, random_ids(llama, 2, 3, seed=1)], 1)
    with pytest.raises(
        PrefixMismatchError, match=f"stands for {CONTEXT + 9} tokens, of which {CONTEXT - 1} are known"
    ):
        cache.prepare({"input_ids": prompt})
    with pytest.raises(PrefixMismatchError, match="Pass what `generate` returned, the prompt included"):
        cache.prepare({"input_ids": prompt}, sequences=sequences[:, :-2])
    with pytest.raises(PrefixMismatchError, match="`sequences` is not what the cache has read: row 0"):
        cache.prepare({"input_ids": prompt}, sequences=sequences.flip(0))
    assert_native(llama, prompt, cache.prepare({"input_ids": prompt}, sequences=sequences))


def test_a_padding_token_that_was_generated_is_no_padding(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT])
    sequences = hf_kvtransfer.generate(
        llama, {"input_ids": ids}, cache, prefix_allowed_tokens_fn=lambda *_: [0], max_new_tokens=3
    )
    assert sequences[0, -3:].tolist() == [0] * 3
    prompt = torch.cat([sequences, random_ids(llama, 2, 3, seed=1)], 1)
    assert_native(llama, prompt, cache.prepare({"input_ids": prompt}))


def test_a_beam_search_leaves_rows_that_are_no_prompts(llama, ids):
    cache = translated(llama, ids[:1, :CONTEXT])
    sequences = hf_kvtransfer.generate(llama, {"input_ids": ids[:1]}, cache, num_beams=3, max_new_tokens=3)
    assert torch.equal(sequences, llama.generate(ids[:1], num_beams=3, max_new_tokens=3))
    with pytest.raises(BatchMismatchError, match="has 1 rows, the cache 3: a beam search"):
        cache.prepare({"input_ids": ids[:1]}, sequences=sequences)


def test_windows_that_have_dropped_what_a_cut_needs(gemma):
    ids = random_ids(gemma, 1, CONTEXT + 6)
    prompt = ids.clone()
    prompt[:, 20:] = random_ids(gemma, 1, CONTEXT - 14, seed=3)
    for make in (translated, forgiving):
        cache = make(gemma, ids[:, :CONTEXT])
        hf_kvtransfer.generate(gemma, {"input_ids": ids}, cache, max_new_tokens=4, do_sample=False)
        if make is translated:
            with pytest.raises(PrefixMismatchError, match="cannot be cut to the 20 that"):
                cache.prepare({"input_ids": prompt})
        assert_native(gemma, prompt, cache.prepare({"input_ids": prompt}))
        assert cache.get_seq_length() == CONTEXT + 9


# transformers#37078
def test_without_use_cache(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT])
    with pytest.raises(ValueError, match="`use_cache` is False"):
        hf_kvtransfer.generate(llama, {"input_ids": ids}, cache, use_cache=False)
    # What a generation config says is overruled.
    target = copy.copy(llama)
    target.generation_config = copy.deepcopy(llama.generation_config)
    target.generation_config.use_cache = False
    assert_native(target, ids, cache.prepare({"input_ids": ids}))
    # A forward pass writes into any cache that it is given: keep a copy where it is to be used again.
    cache = translated(llama, ids[:, :CONTEXT])
    kept = copy.deepcopy(cache)
    with torch.no_grad():
        llama(ids[:, CONTEXT - 1 :], use_cache=False, **{cache_argument(llama): cache})
    assert cache.get_seq_length() == CONTEXT + 6
    assert kept.get_seq_length() == CONTEXT - 1
    assert torch.equal(generate(llama, ids, kept)[0], generate(llama, ids)[0])


# transformers#31943
def test_with_or_without_a_mask(gemma):
    ids = random_ids(gemma, 1, CONTEXT + 6)
    cache = translated(gemma, ids[:, :CONTEXT])
    twin = copy.deepcopy(cache)
    with_mask = generate(gemma, ids, cache)
    without = generate(gemma, ids, twin, attention_mask=None)
    assert torch.equal(with_mask[1], without[1])


# transformers#30108
def test_generate_returns_the_cache_that_it_was_given(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT])
    output = hf_kvtransfer.generate(
        llama, {"input_ids": ids}, cache, max_new_tokens=2, do_sample=False, return_dict_in_generate=True
    )
    assert output[cache_argument(llama)] is cache


def test_new_tokens_in_assisted_decoding(llama, ids):
    cache = forgiving(llama, ids[:1, :CONTEXT])
    options = {"prompt_lookup_num_tokens": 2, "attention_mask": torch.ones_like(ids[:1])}
    with pytest.raises(PrefixMismatchError, match="Pass the whole prompt"):
        generate(llama, ids[:1, CONTEXT - 1 :], cache, **options)


def test_past_recording_by_hand_keeps_the_translation(llama, ids):
    cache = translated(llama, ids[:, :CONTEXT])
    cache.activate_past_recording()
    assert cache.get_seq_length() == CONTEXT - 1


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.22"), reason="it works from 5.22 on")
def test_chunks_are_refused_where_they_are_wrong(llama, ids):
    with pytest.raises(ValueError, match="`prefill_chunk_size` is 4, but transformers"):
        hf_kvtransfer.generate(llama, {"input_ids": ids}, translated(llama, ids[:, :CONTEXT]), prefill_chunk_size=4)

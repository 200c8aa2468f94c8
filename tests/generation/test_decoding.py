"""Every way of decoding, on a translated cache in every family: as on what the target reads itself."""

import functools

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation.streamers import BaseStreamer

import hf_kvtransfer

from ..tiny_models import TranslatedCache
from .case import NEW, close
from .families import build


# transformers#37906
def test_greedy(case):
    case.assert_native(case.prompt, case.translated())


def test_sampling(case):
    case.assert_native(case.prompt, case.translated(), do_sample=True, temperature=0.8, top_p=0.9)


def test_several_samples_of_each_prompt(case):
    case.assert_native(case.prompts[:2], case.translated(2), do_sample=True, num_return_sequences=2)


# transformers#27449
def test_beams(case):
    case.assert_native(case.prompt, case.translated(), num_beams=3)


# transformers#11781
def test_beams_of_a_batch_that_return_several(case):
    case.assert_native(case.prompts[:2], case.translated(2), num_beams=3, num_return_sequences=2)


def test_beam_sampling(case):
    case.assert_native(case.prompt, case.translated(), num_beams=2, do_sample=True)


def test_batch(case):
    case.assert_native(case.prompts, case.translated(3))


# transformers#18104
def test_left_padded_batch(case):
    case.assert_native(case.prompts * case.mask, case.translated(3, padded=True), attention_mask=case.mask)


# transformers#35681, transformers#39593
def test_beams_of_a_left_padded_batch(case):
    options = {"attention_mask": case.mask, "num_beams": 2}
    case.assert_native(case.prompts * case.mask, case.translated(3, padded=True), **options)


# unslothai/unsloth#3795, unslothai/unsloth#4078, ndif-team/nnsight#673
def test_rows_of_a_padded_batch_are_as_alone(case):
    found = case.generate(
        case.prompts * case.mask,
        attention_mask=case.mask,
        output_logits=True,
        return_dict_in_generate=True,
        **case.given(case.translated(3, padded=True)),
    )
    for row in range(3):
        ids = case.prompts[row : row + 1, case.mask[row].bool()]
        alone = case.generate(ids, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(found.sequences[row, -NEW:], alone.sequences[0, -NEW:])
        close(torch.stack(found.logits)[:, row], torch.stack(alone.logits)[:, 0])


def test_processed_scores(case):
    case.assert_native(case.prompt, case.translated(), repetition_penalty=1.3, no_repeat_ngram_size=2)


class Collected(BaseStreamer):
    def __init__(self):
        self.pieces, self.has_ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.has_ended = True


def test_streaming(case):
    streamers = Collected(), Collected()
    sequences = case.generate(case.prompt, streamer=streamers[0], **case.given(case.translated()))
    case.generate(case.prompt, streamer=streamers[1])
    assert streamers[0].has_ended
    assert torch.equal(torch.cat(streamers[0].pieces), sequences[0])
    assert torch.equal(torch.cat(streamers[1].pieces), sequences[0])


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"), reason="before 5.22 wrong with any prefilled cache"
)
def test_prefill_in_chunks(case):
    case.assert_native(case.prompts[:2], case.translated(2), prefill_chunk_size=2)


def test_new_tokens_only(case):
    cache = case.translated()
    held = cache.get_seq_length()
    found = case.generate(case.prompt[:, held:], attention_mask=torch.ones_like(case.prompt), **case.given(cache))
    assert torch.equal(found[:, -NEW:], case.generate(case.prompt)[:, -NEW:])


# transformers#35707
def test_embeddings_in_place_of_ids(case, record_property):
    embeddings = case.model.get_input_embeddings()(case.prompt).detach()
    options = {"inputs_embeds": embeddings, "output_logits": True, "return_dict_in_generate": True}
    options["attention_mask"] = torch.ones_like(case.prompt)
    native = case.generate(None, **options)
    if case.family == "gemma3n":
        reason = (
            "its layers look at token ids, too: embeddings that come without are another text to it, with any cache"
        )
        record_property("cell", f"other: {reason}")
        assert not torch.equal(
            native.logits[0], case.generate(case.prompt, **options | {"inputs_embeds": None}).logits[0]
        )
        return
    found = case.generate(None, **options, **case.given(case.translated()))
    assert torch.equal(found.sequences, native.sequences)
    close(found.logits, native.logits)


def test_own_decoding_loop(case):
    calls = []

    def own_loop(model, input_ids, **kwargs):
        calls.append(input_ids.shape)
        return type(model)._sample(model, input_ids, **kwargs)

    case.assert_native(case.prompt, case.translated(), custom_generate=own_loop)
    assert len(calls) == 2


@pytest.fixture(scope="module")
def assistant():
    model = build("llama", seed=1)
    model.generation_config.num_assistant_tokens = 2
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def tokens_read(case, cache, **options):
    """Number of tokens that the target reads in each forward pass of `hf_kvtransfer.generate`."""
    read = []
    embeddings = case.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, args, output: read.append(args[0].shape[1]))
    try:
        case.assert_native(case.prompt, cache, functools.partial(run_once, case, cache, read), **options)
    finally:
        hook.remove()
    return read


def run_once(case, cache, read, ids, **options):
    """`hf_kvtransfer.generate`; what was read before it does not count."""
    read.clear()
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    output = hf_kvtransfer.generate(case.model, {"input_ids": ids}, cache, **options)
    read.append(0)  # what the native run reads comes after
    return output


# transformers#31644, transformers#47447
def test_assisted_decoding(case, assistant):
    cache = case.translated()
    held = cache.get_seq_length()
    read = tokens_read(case, cache, assistant_model=assistant)
    assert read[0] <= case.prompt.shape[1] - held + 2
    assert cache.report.outcome == "translated"


# transformers#31644, transformers#47447
def test_prompt_lookup_decoding(case):
    cache = case.translated()
    held = cache.get_seq_length()
    read = tokens_read(case, cache, prompt_lookup_num_tokens=2)
    assert read[0] <= case.prompt.shape[1] - held + 2


# transformers#31644, transformers#47447
def test_assisted_decoding_by_plain_generate(case, assistant, record_property):
    cache = TranslatedCache(case.source_kv(1), case.mapper, case.model, gate=hf_kvtransfer.FidelityGate(strict=False))
    case.assert_native(case.prompt, cache, assistant_model=assistant)
    assert cache.report.outcome == "recomputed"
    assert "hf_kvtransfer.generate" in str(cache.report)
    record_property(
        "cell",
        "read anew: `model.generate` feeds the whole prompt in assisted decoding. The cache is emptied before, with "
        'the reason in its report, or raises with `on_refusal="raise"`; `hf_kvtransfer.generate` continues from it.',
    )
    with pytest.raises(hf_kvtransfer.RefusedError, match=r"hf_kvtransfer\.generate"):
        case.generate(case.prompt, prompt_lookup_num_tokens=2, **case.given(case.translated()))

"""A translated cache that is used more than once, edited, or sent elsewhere."""

import copy
import pickle

import torch

import hf_kvtransfer

from ..tiny_models import random_ids
from .case import CONTEXT, NEW


# NVIDIA/kvpress#154
def test_second_turn(case):
    cache = case.translated()
    sequences = hf_kvtransfer.generate(
        case.model, {"input_ids": case.prompt}, cache, max_new_tokens=NEW, do_sample=False
    )
    longer = torch.cat([sequences, random_ids(case.model, 1, 3, seed=9)], 1)
    assert cache.get_seq_length() == sequences.shape[1] - 1
    case.assert_native(
        longer,
        None,
        lambda ids, **options: hf_kvtransfer.generate(
            case.model, {"input_ids": ids}, cache, max_new_tokens=NEW, do_sample=False, **options
        ),
    )
    assert cache.report.outcome == "translated"


# transformers#32159, transformers#24841
def test_several_questions_on_copies(case):
    cache = case.translated()
    for seed in (3, 4):
        question = random_ids(case.model, 1, seed, seed=seed)
        case.assert_native(torch.cat([case.prompt[:, :CONTEXT], question], 1), copy.deepcopy(cache))
    assert cache.get_seq_length() == CONTEXT


# transformers#47720
def test_cropping(case):
    cache = case.translated()
    cache.crop(-7)
    assert cache.get_seq_length() == CONTEXT - 7
    case.assert_native(case.prompt, cache)


def test_going_back_after_use(case):
    cache = case.translated()
    cache.activate_past_recording()
    case.generate(case.prompt, **case.given(cache))
    cache.crop(-(cache.get_seq_length() - CONTEXT + 2))
    case.assert_native(case.prompt, cache)


# transformers#48809
def test_reset(case):
    cache = case.translated()
    cache.reset()
    case.assert_native(case.prompts[1:2], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    case.assert_native(case.prompts[2:], cache)


# transformers#36373
def test_pickling(case):
    sent = pickle.dumps(case.translated(2))
    case.assert_native(case.prompts[:2], pickle.loads(sent))


def test_selecting_and_repeating_rows(case):
    cache = case.translated(3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    case.assert_native(case.prompts[[2, 2, 0, 0]], cache)


def test_plain_forward_passes(case):
    """Without `generate`, with positions from the cache."""
    cache = case.translated()
    with torch.no_grad():
        native = case.model(case.prompt).logits[:, CONTEXT:]
        first = case.model(case.prompt[:, CONTEXT:-1], use_cache=True, **case.given(cache)).logits
        last = case.model(case.prompt[:, -1:], use_cache=True, **case.given(cache)).logits
    torch.testing.assert_close(torch.cat([first, last], 1), native, rtol=0, atol=1e-5)

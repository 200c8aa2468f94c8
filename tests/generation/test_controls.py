"""What must not be as native: else the matrix would not see a wrong cache."""

import torch

from .case import CONTEXT


def first_logits(case, ids, **options):
    return case.generate(ids, max_new_tokens=1, output_logits=True, return_dict_in_generate=True, **options).logits[0]


def test_control_another_document(case):
    cache = case.misread(case.prompts[1:2, :CONTEXT], shift=0)
    difference = first_logits(case, case.prompt, **case.given(cache)) - first_logits(case, case.prompt)
    assert difference.abs().max() > 1e-2


def test_control_other_positions(case):
    difference = first_logits(case, case.prompt, **case.given(case.misread(case.prompt[:, :CONTEXT], shift=7)))
    difference = difference - first_logits(case, case.prompt)
    assert difference.abs().max() > 1e-3


def test_as_the_controls_without_their_change(case):
    found = first_logits(case, case.prompt, **case.given(case.misread(case.prompt[:, :CONTEXT], shift=0)))
    torch.testing.assert_close(found, first_logits(case, case.prompt), rtol=0, atol=1e-5)

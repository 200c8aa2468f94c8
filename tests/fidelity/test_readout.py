"""Attention outputs of a live model, against those of modules that are named here."""

import pytest
import torch

from hf_kvtransfer.fidelity.readout import attention_outputs

from ..tiny_models import FAMILIES, random_ids, tiny_model
from .written_out import attention


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_each_layer_in_the_last_forward(family):
    model = tiny_model(family)
    ids = random_ids(model, 2, 12)
    with attention_outputs(model) as outputs:
        model(ids[:, :5])
        assert [output.shape for output in outputs] == [(2, 5, 64)] * 4
        model(ids)
    for row in range(2):
        expected = attention(model, ids[row, :6].tolist(), ids[row, 6:].tolist())
        for output, reference in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output[row, 5:-1], reference, rtol=0, atol=1e-5)


def test_hooks_are_taken_off_also_after_an_error():
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="stop"), attention_outputs(model) as outputs:
        raise RuntimeError("stop")
    with torch.no_grad():
        model(random_ids(model, 1, 5))
    assert not any(output.numel() for output in outputs)
    assert not any(module._forward_hooks for module in model.modules())


class Wrapper(torch.nn.Module):
    """Around a model as PEFT's are."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@torch.no_grad()
def test_a_wrapped_model():
    model = tiny_model("llama")
    ids = random_ids(model, 1, 9)
    wrapper = Wrapper(model)
    with attention_outputs(wrapper) as outputs:
        wrapper(ids)
    for output, reference in zip(outputs, attention(model, ids[0, :1].tolist(), ids[0, 1:].tolist()), strict=True):
        torch.testing.assert_close(output[0, :-1], reference, rtol=0, atol=1e-5)

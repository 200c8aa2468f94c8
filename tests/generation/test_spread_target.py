"""A target whose layers are not all where the computation is."""

import copy

import torch
from accelerate import dispatch_model

from .case import Case


# xinference#5479
def test_beams_on_a_target_with_layers_on_disk(tmp_path):
    case = Case.of("llama")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    target = dispatch_model(copy.deepcopy(case.model), places, main_device="cpu", offload_dir=str(tmp_path))
    beams = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    found = target.generate(case.prompt, **beams, **case.given(case.translated()))
    assert torch.equal(found, case.generate(case.prompt, **beams))

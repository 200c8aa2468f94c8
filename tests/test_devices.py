"""Targets whose weights are not all where the computation is."""

import copy

import pytest
import torch
from accelerate import dispatch_model

from hf_kvtransfer import SourceKV
from hf_kvtransfer.compat import cache_argument

from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache


# transformers#32624, transformers#33147, transformers#33303, transformers#28051, huggingface/peft#2189
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_target_with_layers_on_disk(family, tmp_path):
    model = tiny_model(family)
    ids = random_ids(model, 1, 45)
    mapper = identity_mapper(model)
    native = model.generate(ids, max_new_tokens=6, do_sample=False)
    places = {name: "cpu" for name, _ in model.named_modules() if name.count(".") == 1 and "layers" not in name}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)} | {"lm_head": "cpu"}
    target = dispatch_model(copy.deepcopy(model), places, main_device="cpu", offload_dir=str(tmp_path))
    assert target.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    cache = ungated_cache(SourceKV.prefill(model, None, ids), mapper, target)
    output = target.generate(ids, max_new_tokens=6, do_sample=False, **{cache_argument(target): cache})
    assert torch.equal(output, native)
    # An offloaded model can be the source too.
    source_kv, expected = SourceKV.prefill(target, None, ids), SourceKV.prefill(model, None, ids)
    torch.testing.assert_close(source_kv.features[3], expected.features[3])

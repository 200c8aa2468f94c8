"""Run by test_devices.py in a process of its own: a handoff to a target spread over two devices that are simulated."""

import copy

import torch

from hf_kvtransfer import SourceKV
from hf_kvtransfer.compat import cache_argument

from .simulated_devices import SimulatedTensor, simulated_devices, spread
from .tiny_models import identity_mapper, random_ids, tiny_model, ungated_cache, with_native_layers


def device_of(name: str) -> str:
    """The first half of the model on one device, the second on the other."""
    second = any(f"layers.{i}" in name for i in (2, 3)) or name in ("model.norm", "lm_head")
    return f"sim:{int(second)}"


def main() -> None:
    model = tiny_model("gemma3")
    ids = random_ids(model, 2, 45)
    # As the target's own memory is: where each layer runs.
    places = ["sim:0", "sim:0", "sim:1", "sim:1"]
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    native = model.generate(ids, **options)
    with simulated_devices():
        target = spread(copy.deepcopy(model), device_of)
        elsewhere = spread(copy.deepcopy(model), lambda name: "sim:1")
        for source, mapper in (
            (model, identity_mapper(model)),  # the source on the CPU
            (elsewhere, identity_mapper(model)),  # on one of the target's devices
            (target, with_native_layers(identity_mapper(model), 1)),  # spread as the target
        ):
            source_kv = SourceKV.prefill(source, None, ids)
            cache = ungated_cache(source_kv, mapper, target)
            output = target.generate(SimulatedTensor(ids, "sim:0"), **options, **{cache_argument(target): cache})
            assert [str(layer.keys.device) for layer in cache.layers] == places
            assert output.sequences.tolist() == native.sequences.tolist()
            for logits, expected in zip(output.logits, native.logits, strict=True):
                torch.testing.assert_close(logits.to("cpu"), expected, rtol=0, atol=1e-5)
            # The maps have followed the layers that they serve.
            moved = {i: str(next(mapper.layers[i].parameters()).device) for i in mapper.config.mapped_layers}
            assert moved == {i: places[i] for i in moved}, moved
        # What is on the wrong device is noticed here as it is between GPUs.
        cache = ungated_cache(source_kv, mapper, target)
        _ = [layer.keys for layer in cache.layers]  # read before the target asks: all where its inputs are
        try:
            target.generate(SimulatedTensor(ids, "sim:0"), max_new_tokens=2, **{cache_argument(target): cache})
        except RuntimeError as error:
            assert "same device" in str(error)
        else:
            raise AssertionError("tensors of two devices went together")
    print("as native")


if __name__ == "__main__":
    main()

"""
How much memory a handoff takes beyond the target's cache, against the length of the context.

Counted are the bytes of all tensors that are alive between the first line of a handoff and the moment when every layer
of the target holds its tokens and one more, minus those of the cache: on the CPU, where nothing else counts them. The
source's cache was there before. In units of what the target's largest layer holds.

    python -m benchmarks.memory
"""

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_kvtransfer import RefusedError, TranslatedCache

from .demo_pair import DemoPair, demo_parser, write_json
from .timing import UNGATED, read_layers


class LiveTensors(TorchDispatchMode):
    """
    Counts the bytes of the tensors that operations in here have made and that are still alive.

    Memory that an operation takes and gives back before it returns is not seen.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if _is_counted(value)}
        for value in tree_iter(output):
            if _is_counted(value) and value.untyped_storage()._cdata not in given:
                self._count(value.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_):
            del self._storages[key]
            self.bytes -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def _is_counted(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def temporary_memory(source_kv, mapper, target, **options):
    """
    Args:
        source_kv (`SourceKV`):
            What the source has read.
        mapper (`KVMapper`), target (`PreTrainedModel`):
            As in [`TranslatedCache`], in the dtype that the target computes in.
        options:
            For [`TranslatedCache`].

    Returns:
        `tuple[int, int, int]`: Bytes beside the cache at the highest, of the target's largest layer, and of the cache.
    """
    gc.collect()
    with LiveTensors() as live, torch.no_grad():
        cache = TranslatedCache(source_kv, mapper, target, **options)
        del source_kv
        assert cache.report.outcome == "translated", cache.report
        for layer_idx, layer in enumerate(mapper.target_geometry.layers):
            if layer is not None:  # as the target does when it reads one more token
                shape = len(cache.input_ids), layer.num_key_value_heads, 1
                keys = torch.zeros(*shape, layer.key_head_dim, dtype=target.dtype)
                cache.update(keys, torch.zeros(*shape, layer.value_head_dim, dtype=target.dtype), layer_idx)
    states = [(layer.keys, layer.values) for layer in cache.layers if layer.keys is not None]
    layers = [sum(part.untyped_storage().nbytes() for part in parts) for parts in states]
    return live.peak - sum(layers), max(layers), sum(layers)


def main(arguments: list[str] | None = None) -> None:
    options = demo_parser(__doc__, [256, 1024, 4096]).parse_args(arguments)
    torch.set_num_threads(options.threads)
    pair = DemoPair(options.mapper, max(options.lengths))
    handed = pair.mapper, pair.target
    print("\nfloat32, MB of tensors")
    print(f"{'tokens':>7}{'cache':>9}{'layer':>8}{'beside the cache':>22}{'with the probe':>24}")
    results = {}
    # What is found out about a model, cos and sin of its first positions, and dense weights are kept for as long as it
    # lives: not a part of any handoff.
    longest, _ = pair.read(max(options.lengths))
    read_layers(TranslatedCache(longest, *handed, target_tokenizer=pair.tokenizer, **UNGATED))
    for length in options.lengths:
        source_kv, _ = pair.read(length)
        handing = {"target_tokenizer": pair.tokenizer, **UNGATED}
        plain, layer, cache = temporary_memory(source_kv, *handed, **handing)
        try:
            probed, _, _ = temporary_memory(source_kv, *handed, **handing | {"probe_tokens": None})
        except RefusedError:  # a false alarm
            probed = None
        results[length] = {"cache": cache, "layer": layer, "temporary": plain, "with_probe": probed}
        with_probe = "refused" if probed is None else f"{probed / 1e6:.2f} = {probed / layer:.2f} layers"
        print(
            f"{length:7}{cache / 1e6:9.2f}{layer / 1e6:8.2f}{plain / 1e6:10.2f} = {plain / layer:.2f} layers"
            f"{with_probe:>24}",
            flush=True,
        )
    write_json(options.json, results)


if __name__ == "__main__":
    main()

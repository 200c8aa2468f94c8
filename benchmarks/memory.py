"""
How much memory a handoff takes beyond the target's cache, against the length of the context.

Counted are the bytes of all tensors that are alive between the first line of a handoff and the moment when every layer
of the target holds its tokens and one more, minus those of the cache: on the CPU, where nothing else counts them. The
source's cache was there before. In units of what the target's largest layer holds.

    python benchmarks/memory.py
"""

import argparse
import gc
import json
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_kvtransfer import FidelityGate, KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.demo_models import load_demo_model


ROOT = Path(__file__).parents[1]
MAPPER = ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m"
TEXT_FILES = ("examples/harbour.txt", "LICENSE", "mappers/README.md", "README.md")


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


def long_text(tokens):
    """Text of the repository, of so many tokens and more: not one over and over, which a model could copy."""
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXT_FILES)
    return text * (1 + 2 * tokens // len(text.split()))


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096], help="target tokens")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    text = long_text(max(arguments.lengths))
    _, spans = encode_with_spans(target_tokenizer, text)
    print("\nfloat32, MB of tensors")
    print(f"{'tokens':>7}{'cache':>9}{'layer':>8}{'beside the cache':>22}{'with the probe':>24}")
    results = {}
    # What is found out about a model is kept for as long as it lives: not a part of any handoff.
    source_kv = SourceKV.prefill(source, source_tokenizer, text[: spans[31][1]])
    TranslatedCache(source_kv, mapper, target, target_tokenizer=target_tokenizer, gate=FidelityGate(strict=False))
    for length in arguments.lengths:
        source_kv = SourceKV.prefill(source, source_tokenizer, text[: spans[length - 1][1]])
        row = []
        for probe in (0, None):
            options = {"gate": FidelityGate(strict=False), "probe_tokens": probe}
            row.append(temporary_memory(source_kv, mapper, target, target_tokenizer=target_tokenizer, **options))
        (plain, layer, cache), (probed, _, _) = row
        results[length] = {"cache": cache, "layer": layer, "temporary": plain, "with_probe": probed}
        print(
            f"{length:7}{cache / 1e6:9.2f}{layer / 1e6:8.2f}{plain / 1e6:10.2f} = {plain / layer:.2f} layers"
            f"{probed / 1e6:12.2f} = {probed / layer:.2f} layers",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

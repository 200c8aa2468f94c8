"""
How much faster a handoff is than the target's own prefill, as a ratio inside one run.

The source cache is in hand; a handoff is then everything until the target holds all its layers: comparing both models
with the mapper's evidence, aligning the tokenizers, reading the first tokens natively, translating, and, with the
probe, reading the last tokens. Runs are interleaved and medians taken.

    python benchmarks/speed.py
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from hf_kvtransfer import FidelityGate, KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.demo_models import load_demo_model
from hf_kvtransfer.spans import encode_with_spans


ROOT = Path(__file__).parents[1]
MAPPER = ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m"


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(source, source_tokenizer, target, target_tokenizer, mapper, text, length, runs):
    """
    Returns:
        `dict`: Median seconds of the target's prefill of `length` tokens, of a handoff by parts, and of one with the
        probe, as it is by default.
    """
    _, spans = encode_with_spans(target_tokenizer, text)
    context = text[: spans[length - 1][1]]
    input_ids = torch.tensor([encode_with_spans(target_tokenizer, context)[0]])
    source_kv = SourceKV.prefill(source, source_tokenizer, context)
    times = {"prefill": [], "bind": [], "translate": [], "with probe": []}

    def handoff(**options):
        # Whatever the evidence says: this is about time.
        return TranslatedCache(
            source_kv,
            mapper,
            target,
            target_tokenizer=target_tokenizer,
            gate=FidelityGate(strict=False),
            **options,
        )

    def read_layers(cache):
        for layer in cache.layers:
            _ = layer.keys  # a read translates

    for run in range(runs + 1):
        prefill = seconds(lambda: read_into_cache(target, DynamicCache(config=target.config), input_ids))
        caches = []

        binding = seconds(lambda caches=caches: caches.append(handoff(probe_tokens=0)))
        translating = seconds(lambda caches=caches: read_layers(caches[0]))
        probed = seconds(lambda caches=caches: read_layers(caches.append(handoff()) or caches[1]))
        report = caches[1].report
        assert report.probe is not None, "the mapper's evidence has no band for a probe"
        if run:  # the first one warms up
            for name, value in zip(times, (prefill, binding, translating, probed), strict=True):
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / (b + t) for p, b, t, _ in zip(*times.values(), strict=True)]
    return medians | {
        "ratio": medians["prefill"] / (medians["bind"] + medians["translate"]),
        "ratio_range": [min(ratios), max(ratios)],
        "ratio_with_probe": medians["prefill"] / medians["with probe"],
        "passed_probe": report.probe.passed,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096], help="target tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    # Not one text over and over: a model that copies it has no use for a cache that is nearly right.
    files = ("examples/harbour.txt", "LICENSE", "mappers/README.md", "README.md")
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    text *= 1 + 2 * max(arguments.lengths) // len(text.split())
    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {arguments.runs} runs")
    print(f"{'tokens':>7}{'prefill':>10}{'bind':>9}{'translate':>11}{'ratio':>8}   range        with the probe")
    results = {}
    for length in arguments.lengths:
        result = measure(source, source_tokenizer, target, target_tokenizer, mapper, text, length, arguments.runs)
        results[length] = result
        low, high = result["ratio_range"]
        print(
            f"{length:7}{result['prefill']:9.3f}s{result['bind']:8.3f}s{result['translate']:10.3f}s"
            f"{result['ratio']:7.1f}x   {low:.1f} to {high:.1f}   {result['with probe']:.3f}s "
            f"{result['ratio_with_probe']:.1f}x{'' if result['passed_probe'] else ' (refused)'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

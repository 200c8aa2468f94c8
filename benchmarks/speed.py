"""
How much faster a handoff is than the target's own prefill, as a ratio inside one run.

The source cache is in hand; a handoff is then everything until the target holds all its layers: aligning the
tokenizers, reading the first tokens natively, translating. Runs of both are interleaved and medians taken.

    python benchmarks/speed.py
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from hf_kvtransfer import KVMapper, SourceKV, TranslatedCache
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
        `dict`: Median seconds of the target's prefill of `length` tokens, and of a handoff by parts.
    """
    _, spans = encode_with_spans(target_tokenizer, text)
    context = text[: spans[length - 1][1]]
    input_ids = torch.tensor([encode_with_spans(target_tokenizer, context)[0]])
    source_kv = SourceKV.prefill(source, source_tokenizer, context)
    times = {"prefill": [], "bind": [], "translate": []}
    for run in range(runs + 1):
        prefill = seconds(lambda: read_into_cache(target, DynamicCache(config=target.config), input_ids))
        caches = []

        def bind(caches=caches):
            caches.append(TranslatedCache(source_kv, mapper, target, target_tokenizer=target_tokenizer))

        binding = seconds(bind)

        def translate(caches=caches):
            for layer in caches[0].layers:
                assert layer.keys is not None  # a read translates

        translating = seconds(translate)
        if run:  # the first one warms up
            for name, value in zip(times, (prefill, binding, translating), strict=True):
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / (b + t) for p, b, t in zip(*times.values(), strict=True)]
    return medians | {
        "ratio": medians["prefill"] / (medians["bind"] + medians["translate"]),
        "ratio_range": [min(ratios), max(ratios)],
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
    text = (ROOT / "examples" / "harbour.txt").read_text(encoding="utf-8")
    text *= 1 + 2 * max(arguments.lengths) // len(text.split())
    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {arguments.runs} runs")
    print(f"{'tokens':>7}{'prefill':>10}{'bind':>9}{'translate':>11}{'ratio':>8}   range")
    results = {}
    for length in arguments.lengths:
        result = measure(source, source_tokenizer, target, target_tokenizer, mapper, text, length, arguments.runs)
        results[length] = result
        low, high = result["ratio_range"]
        print(
            f"{length:7}{result['prefill']:9.3f}s{result['bind']:8.3f}s{result['translate']:10.3f}s"
            f"{result['ratio']:7.1f}x   {low:.1f} to {high:.1f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

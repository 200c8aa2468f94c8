"""
How much faster a handoff is than the target's own prefill, as a ratio inside one run.

The source cache is in hand; a handoff is then everything until the target holds all its layers: comparing both models
with the mapper's evidence, aligning the tokenizers, reading the first tokens natively, translating, and, with the
probe, reading the last tokens. Runs are interleaved and medians taken.

The second table says where the time of a handoff without the probe goes, again as ratios: what the matrix products of
the translation reach of the rate that this machine reaches between them in a large product, and all of the translation
with them; the first token through `generate` against translation plus one native step; a step of decoding after a
handoff against one after a prefill, step by step in turns; and memory beside the cache in units of its largest layer.

    python benchmarks/speed.py
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from memory import long_text, temporary_memory
from operations import Operations, matmul_rate
from transformers import DynamicCache

from hf_kvtransfer import FidelityGate, KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import cache_argument, read_into_cache
from hf_kvtransfer.demo_models import load_demo_model


ROOT = Path(__file__).parents[1]
MAPPER = ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m"
PROBE_NOTES = {True: "", False: " (refused)", None: " (no probe: the evidence has no band)"}


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Case:
    """A context of so many tokens of the target, read by the source, and the ways to hand it over."""

    def __init__(self, source, source_tokenizer, target, target_tokenizer, mapper, text, length):
        _, spans = encode_with_spans(target_tokenizer, text)
        context = text[: spans[length - 1][1]]
        self.input_ids = torch.tensor([encode_with_spans(target_tokenizer, context)[0]])
        self.source_kv = SourceKV.prefill(source, source_tokenizer, context)
        self.mapper, self.target = mapper, target
        # Whatever the evidence says: this is about time.
        self.options = {"target_tokenizer": target_tokenizer, "gate": FidelityGate(strict=False)}

    def handoff(self, **options):
        return TranslatedCache(self.source_kv, self.mapper, self.target, **self.options, **options)

    def prefill(self, tokens=None):
        cache = DynamicCache(config=self.target.config)
        read_into_cache(self.target, cache, self.input_ids[:, :tokens])
        return cache

    def step(self, cache, token):
        read_into_cache(self.target, cache, self.input_ids[:, token : token + 1], num_logits=1)


def read_layers(cache):
    for layer in cache.layers:
        _ = layer.keys  # a read translates


def measure(case, runs):
    """
    Returns:
        `dict`: Median seconds of the target's prefill, of a handoff by parts, and of one with the probe, as it is by
        default.
    """
    times = {"prefill": [], "bind": [], "translate": [], "with probe": []}
    probe = None
    for run in range(runs + 1):
        prefill = seconds(case.prefill)
        caches = []

        binding = seconds(lambda caches=caches: caches.append(case.handoff(probe_tokens=0)))
        translating = seconds(lambda caches=caches: read_layers(caches[0]))
        probed = seconds(lambda caches=caches: read_layers(caches.append(case.handoff()) or caches[1]))
        probe = caches[1].report.probe
        if run:  # the first one warms up
            for name, value in zip(times, (prefill, binding, translating, probed), strict=True):
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / (b + t) for p, b, t, _ in zip(*times.values(), strict=True)]
    return medians | {
        "ratio": medians["prefill"] / (medians["bind"] + medians["translate"]),
        "ratio_range": [min(ratios), max(ratios)],
        "ratio_with_probe": medians["prefill"] / medians["with probe"],
        "passed_probe": None if probe is None else probe.passed,  # None without a band in the evidence
    }


def measure_shares(case, runs, steps):
    """
    Returns:
        `dict`: The ratios of the second table.
    """
    product_shares, shares, first_token, parts = [], [], [], []
    for run in range(runs + 1):
        cache, rates = case.handoff(probe_tokens=0), [matmul_rate()]
        with Operations() as operations:
            read_layers(cache)
        rates.append(matmul_rate())
        handed, native = case.handoff(probe_tokens=0), case.prefill(-1)
        translating = seconds(lambda handed=handed: read_layers(handed))
        stepping = seconds(lambda native=native: case.step(native, len(case.input_ids[0]) - 1))
        options = {cache_argument(case.target): case.handoff(probe_tokens=0), "max_new_tokens": 1, "do_sample": False}
        generating = seconds(lambda options=options: case.target.generate(case.input_ids, **options))
        if run:
            product_shares.append(operations.flops / operations.product_seconds / max(rates))
            shares.append(operations.flops / translating / max(rates))
            first_token.append(generating)
            parts.append(translating + stepping)
    # What is decoded is the same on both sides, and none of it matters.
    sides = {"native": copy.deepcopy(native), "handed": handed}
    taken = {name: [] for name in sides}
    for token in range(steps):
        for name in sorted(sides, reverse=bool(token % 2)):
            taken[name].append(seconds(lambda name=name, token=token: case.step(sides[name], token)))
    temporary, layer, _ = temporary_memory(case.source_kv, case.mapper, case.target, probe_tokens=0, **case.options)
    return {
        "product_share": statistics.median(product_shares),
        "translation_share": statistics.median(shares),
        "first_token": statistics.median(first_token) / statistics.median(parts),
        "decode": statistics.median(taken["handed"]) / statistics.median(taken["native"]),
        "temporary_layers": temporary / layer,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096], help="target tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    text = long_text(max(arguments.lengths))
    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {arguments.runs} runs")
    print(f"{'tokens':>7}{'prefill':>10}{'bind':>9}{'translate':>11}{'ratio':>8}   range        with the probe")
    results = {}
    for length in arguments.lengths:
        case = Case(source, source_tokenizer, target, target_tokenizer, mapper, text, length)
        results[length] = result = measure(case, arguments.runs)
        low, high = result["ratio_range"]
        print(
            f"{length:7}{result['prefill']:9.3f}s{result['bind']:8.3f}s{result['translate']:10.3f}s"
            f"{result['ratio']:7.1f}x   {low:.1f} to {high:.1f}   {result['with probe']:.3f}s "
            f"{result['ratio_with_probe']:.1f}x{PROBE_NOTES[result['passed_probe']]}",
            flush=True,
        )
    print(f"\n{'tokens':>7}{'products':>10}{'translation':>13}{'first token':>13}{'decoding':>10}{'memory':>13}")
    for length in arguments.lengths:
        case = Case(source, source_tokenizer, target, target_tokenizer, mapper, text, length)
        shares = measure_shares(case, arguments.runs, arguments.steps)
        results[length] |= shares
        print(
            f"{length:7}{shares['product_share']:10.0%}{shares['translation_share']:13.0%}{shares['first_token']:12.2f}x"
            f"{shares['decode']:9.3f}x{shares['temporary_layers']:6.2f} layers",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

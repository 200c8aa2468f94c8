"""
How much faster a handoff is than the target's own prefill, as a ratio inside one run.

The source cache is in hand; a handoff is then everything until the target holds all its layers: comparing both models
with the mapper's evidence, aligning the tokenizers, reading the first tokens natively, translating, and, with the
probe, reading the last tokens. What the target has made of a beginning is held for later contexts that begin alike, as
behind one chat template: in the first table "new beginning" is the ratio of a handoff whose first tokens were never
read before, all other figures are of later ones. Runs are interleaved and medians taken.

The second table says where the time of a handoff without the probe goes, again as ratios: what the matrix products of
the translation reach of the rate that this machine reaches between them in a large product, and all of the translation
with them; the first token through `generate` against translation plus one native step; a step of decoding after a
handoff against one after a prefill, step by step in turns; and memory beside the cache in units of its largest layer.

    python -m benchmarks.speed
"""

import copy
import statistics

import torch
from transformers import DynamicCache

from hf_kvtransfer import TranslatedCache
from hf_kvtransfer.compat import cache_argument, read_into_cache
from hf_kvtransfer.first_tokens import HELD

from .demo_pair import DemoPair, demo_parser, write_json
from .memory import temporary_memory
from .operations import Operations, matmul_rate
from .timing import UNGATED, read_layers, seconds, time_handoff, time_prefill


PROBE_NOTES = {True: "", False: " (refused)", None: " (no probe: the evidence has no band)"}


class Case:
    """A context of so many tokens of the target, read by the source, and the ways to hand it over."""

    def __init__(self, pair, length):
        self.source_kv, self.input_ids = pair.read(length)
        self.target, self.handed = pair.target, (pair.mapper, pair.target)
        self.tokenizer = pair.tokenizer

    def handoff(self, probe_tokens=None):
        options = {"gate": UNGATED["gate"], "target_tokenizer": self.tokenizer, "probe_tokens": probe_tokens}
        return TranslatedCache(self.source_kv, *self.handed, **options)  # a probe that refuses is told of, not raised

    def prefill(self):
        """All but the last token."""
        cache = DynamicCache(config=self.target.config)
        read_into_cache(self.target, cache, self.input_ids[:, :-1])
        return cache

    def step(self, cache, token):
        read_into_cache(self.target, cache, self.input_ids[:, token : token + 1], num_logits=1)

    def seconds(self, function):
        return seconds(function, self.target.device)


def measure(case, runs):
    """
    Returns:
        `dict`: Median seconds of the target's prefill, of a handoff by parts, of one with the probe, as it is by
        default, and of one without it whose first tokens are new.
    """
    times = {"prefill": [], "bind": [], "translate": [], "with probe": [], "new beginning": []}
    probe = None
    for run in range(runs + 1):
        caches = []
        prefill = time_prefill(case.target, case.input_ids)
        binding, translating = time_handoff(case.source_kv, *case.handed, case.tokenizer)
        probed = case.seconds(lambda caches=caches: read_layers(caches.append(case.handoff()) or caches[0]))
        probe = caches[0].report.probe
        HELD.clear()
        new = sum(time_handoff(case.source_kv, *case.handed, case.tokenizer))
        if run:  # the first one warms up
            for name, value in zip(times, (prefill, binding, translating, probed, new), strict=True):
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [p / (b + t) for p, b, t, *_ in zip(*times.values(), strict=True)]
    return medians | {
        "ratio": medians["prefill"] / (medians["bind"] + medians["translate"]),
        "ratio_range": [min(ratios), max(ratios)],
        "ratio_with_probe": medians["prefill"] / medians["with probe"],
        "ratio_new_beginning": medians["prefill"] / medians["new beginning"],
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
        handed, native = case.handoff(probe_tokens=0), case.prefill()
        translating = case.seconds(lambda handed=handed: read_layers(handed))
        stepping = case.seconds(lambda native=native: case.step(native, len(case.input_ids[0]) - 1))
        options = {cache_argument(case.target): case.handoff(probe_tokens=0), "max_new_tokens": 1, "do_sample": False}
        generating = case.seconds(lambda options=options: case.target.generate(case.input_ids, **options))
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
            taken[name].append(case.seconds(lambda name=name, token=token: case.step(sides[name], token)))
    options = UNGATED | {"target_tokenizer": case.tokenizer}
    temporary, layer, _ = temporary_memory(case.source_kv, *case.handed, **options)
    return {
        "product_share": statistics.median(product_shares),
        "translation_share": statistics.median(shares),
        "first_token": statistics.median(first_token) / statistics.median(parts),
        "decode": statistics.median(taken["handed"]) / statistics.median(taken["native"]),
        "temporary_layers": temporary / layer,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = demo_parser(__doc__, [256, 1024, 4096])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128, help="tokens to decode")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    pair = DemoPair(options.mapper, max(options.lengths))
    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {options.runs} runs")
    columns = f"{'tokens':>7}{'prefill':>10}{'bind':>9}{'translate':>11}{'ratio':>8}"
    print(f"{columns}   range   new beginning   with the probe")
    results = {}
    for length in options.lengths:
        case = Case(pair, length)
        results[length] = result = measure(case, options.runs)
        low, high = result["ratio_range"]
        print(
            f"{length:7}{result['prefill']:9.3f}s{result['bind']:8.3f}s{result['translate']:10.3f}s"
            f"{result['ratio']:7.1f}x   {low:.1f} to {high:.1f}   {result['ratio_new_beginning']:.1f}x   "
            f"{result['with probe']:.3f}s "
            f"{result['ratio_with_probe']:.1f}x{PROBE_NOTES[result['passed_probe']]}",
            flush=True,
        )
    print(f"\n{'tokens':>7}{'products':>10}{'translation':>13}{'first token':>13}{'decoding':>10}{'memory':>13}")
    for length in options.lengths:
        case = Case(pair, length)
        shares = measure_shares(case, options.runs, options.steps)
        results[length] |= shares
        print(
            f"{length:7}{shares['product_share']:10.0%}{shares['translation_share']:13.0%}{shares['first_token']:12.2f}x"
            f"{shares['decode']:9.3f}x{shares['temporary_layers']:6.2f} layers",
            flush=True,
        )
    write_json(options.json, results)


if __name__ == "__main__":
    main()

"""
How times and memory grow with the length of a context, and a fit with its text.

A prefill must grow faster than a translation, which must grow as the tokens do, and the memory of neither a handoff
(in units of the target's layers) nor a fit may grow at all. Figures go to a JSON file, and what is drawn to an SVG.

    python -m benchmarks.growth docs/growth
    python -m benchmarks.growth random --source-config org/source --target-config org/target
"""

import argparse
import json
import resource
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from hf_kvtransfer import KVGeometry, SourceKV, fit_mapper

from .demo_pair import MAPPER, DemoPair
from .exponents import fit_growth
from .memory import temporary_memory
from .random_pair import random_mapper, random_model, random_source_kv
from .timing import UNGATED, machine_rates, seconds, time_handoff, time_prefill


# Of each text of a fit; and what source layers are chosen on, the same for all amounts of text.
FIT_LENGTH, SCREENING_TOKENS = 256, 2048


class RealPair(DemoPair):
    """With what a fit of it takes."""

    def fit(self, num_tokens: int) -> None:
        starts = range(0, len(self.spans) - FIT_LENGTH, FIT_LENGTH)
        pieces = [self.text[self.spans[i][0] : self.spans[i + FIT_LENGTH - 1][1]] for i in starts]
        _fit(self, pieces, num_tokens, **self.tokenizers)


class RandomPair:
    """Any two configs, one vocabulary: token ids are drawn, and weights."""

    def __init__(self, source_config: str, target_config: str, dtype: torch.dtype, device: str):
        configs = [AutoConfig.from_pretrained(name) for name in (source_config, target_config)]
        self.source, self.target = (random_model(config, dtype, device) for config in configs)
        self.tokenizer, self._dtype, self._device = None, dtype, device
        self._geometries = [KVGeometry.from_model(model) for model in (self.source, self.target)]
        hidden_size = configs[1].get_text_config().hidden_size
        self.mapper = random_mapper(*self._geometries, hidden_size, 4, dtype, device)
        self._vocabulary = min(config.get_text_config().vocab_size for config in configs)

    def read(self, length: int) -> tuple[SourceKV, torch.Tensor]:
        input_ids = torch.randint(self._vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
        return random_source_kv(self._geometries[0], input_ids, self._dtype, self._device), input_ids

    def fit(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        _fit(
            self,
            torch.randint(self._vocabulary, (num_tokens // FIT_LENGTH + 1, FIT_LENGTH), generator=generator),
            num_tokens,
        )


def _fit(pair: "RealPair | RandomPair", texts, num_tokens: int, **tokenizers) -> None:
    fit_mapper(
        pair.source,
        pair.target,
        texts,
        **tokenizers,
        num_source_layers=1,
        max_tokens=num_tokens,
        max_length=FIT_LENGTH,
        held_out_every=5,
        screening_tokens=SCREENING_TOKENS,
    )


def measure(pair: RealPair | RandomPair, lengths: list[int], fit_tokens: list[int], runs: int) -> dict[str, list]:
    """
    Returns:
        `dict[str, list]`: For each quantity pairs of tokens and what was measured: seconds, bytes, or target layers.
    """
    found: dict[str, list] = {
        name: [] for name in ("fit", "fit memory", "prefill", "bind", "translation", "handoff", "temporary layers")
    }
    for tokens in fit_tokens:
        found["fit"].append((tokens, seconds(lambda tokens=tokens: pair.fit(tokens), pair.target.device)))
        # Never falls: what grows with the text would be seen to.
        found["fit memory"].append((tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        _tell("fit", tokens, found["fit"][-1][1])
    source_kv, input_ids = pair.read(lengths[0])
    time_prefill(pair.target, input_ids)
    time_handoff(source_kv, pair.mapper, pair.target, pair.tokenizer)
    for length in lengths:
        source_kv, input_ids = pair.read(length)
        for _ in range(runs):
            prefill = time_prefill(pair.target, input_ids)
            bind, translate = time_handoff(source_kv, pair.mapper, pair.target, pair.tokenizer)
            for name, value in (
                ("prefill", prefill),
                ("bind", bind),
                ("translation", translate),
                ("handoff", bind + translate),
            ):
                found[name].append((length, value))
        if pair.target.device.type == "cpu":  # where tensors are counted
            temporary, layer, _ = temporary_memory(
                source_kv, pair.mapper, pair.target, target_tokenizer=pair.tokenizer, **UNGATED
            )
            found["temporary layers"].append((length, temporary / layer))
        _tell("prefill", length, prefill)
        _tell("handoff", length, bind + translate)
    return found


def _tell(name: str, tokens: int, value: float) -> None:
    print(f"{name:>10}{tokens:8} tokens{value:10.3f} s", file=sys.stderr, flush=True)


def exponents(found: dict[str, list]) -> dict[str, dict]:
    """How each quantity grows, where it was measured at three lengths or more."""
    grown = {}
    for name, measured in found.items():
        if len({tokens for tokens, _ in measured}) >= 3:
            # What is to be flat is nothing but a fixed part: its plain power is asked for.
            growth = fit_growth(*zip(*measured, strict=True), has_fixed=name not in ("fit memory", "temporary layers"))
            grown[name] = vars(growth)
    return grown


def draw(found: dict[str, list], grown: dict[str, dict], path: Path) -> None:
    """Times on logarithmic axes, with what was fitted."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=[3, 2])
    for name in ("prefill", "handoff", "translation", "fit"):
        measured = found[name]
        if not measured:
            continue
        x, y = zip(*measured, strict=True)
        label = name
        if name in grown:
            growth = grown[name]
            label += f": {growth['exponent']:.2f} [{growth['low']:.2f}, {growth['high']:.2f}]"
            points = sorted(set(x))
            times.plot(
                points, [growth["fixed"] + growth["rate"] * n ** growth["exponent"] for n in points], "k:", lw=0.8
            )
        times.plot(x, y, "o", ms=3, label=label)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds", title="Time, and exponents")
    times.legend(fontsize=7)
    for name, scale, label in (
        ("temporary layers", 1, "handoff, beside the cache: target layers"),
        ("fit memory", 1e9, "fit, the process's peak: GB"),
    ):
        if found[name]:
            x, y = zip(*found[name], strict=True)
            memory.plot(x, [value / scale for value in y], "o-", ms=3, label=label)
    memory.set(xscale="log", ylim=(0, None), xlabel="tokens", title="Memory")
    memory.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where .json and .svg are written, without the ending")
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id, for the two demo models")
    parser.add_argument("--source-config", help="folder or Hub id of a config, for random weights")
    parser.add_argument("--target-config")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--fit-tokens", type=int, nargs="*", default=[3072, 6144, 12288], help="none for no fits")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="of random weights")
    options = parser.parse_args(arguments)
    if bool(options.source_config) != bool(options.target_config):
        parser.error("--source-config and --target-config go together")

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if options.source_config:
        pair: RealPair | RandomPair = RandomPair(options.source_config, options.target_config, dtype, options.device)
    else:
        pair = RealPair(options.mapper, max(*options.lengths, *options.fit_tokens, 0), dtype)
    rates = machine_rates(dtype, pair.target.device)
    found = measure(pair, options.lengths, options.fit_tokens, options.runs)
    grown = exponents(found)
    for name, growth in grown.items():
        print(f"{name:>17} ~ tokens ** {growth['exponent']:.2f} [{growth['low']:.2f}, {growth['high']:.2f}]")
    setting = {
        "pair": [options.source_config, options.target_config] if options.source_config else "demo models",
        "dtype": options.dtype,
        "device": str(pair.target.device),
        "threads": torch.get_num_threads(),
        "flops_per_second": rates[0],
        "bytes_per_second": rates[1],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = {"setting": setting, "exponents": grown, "measured": found}
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    try:
        draw(found, grown, options.output.with_suffix(".svg"))
    except ImportError as error:
        print(f"The figures are written, but not drawn: {error}. `pip install matplotlib`.", file=sys.stderr)


if __name__ == "__main__":
    main()

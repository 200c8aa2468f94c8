"""
What a handoff between large models is bound to take on named GPUs, from shapes and public peak figures.

    python -m benchmarks.roofline --json docs/roofline.json
    python -m benchmarks.roofline --measure 14B-to-32B --num-source-layers 8

Each part takes its operations at the peak rate, or its bytes at the peak bandwidth, whichever is longer. That is a
bound, not a forecast: both the prefill and the handoff reach some share of it. With `--measure` the same geometry runs
on this machine with random weights, and the share is printed. The source's weights are not needed, since its cache is
drawn at random; where the target does not fit (8B-to-70B takes 141 GB and the mapper) give `--layers`, and the figures
of fewer target layers are scaled up.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from hf_kvtransfer import KVGeometry

from .counting import kv_bytes, map_weights, prefill_flops, translation_bytes, weight_bytes
from .random_pair import geometry_on_meta, map_specs, random_mapper, random_model, random_source_kv
from .timing import machine_rates, time_handoff, time_prefill


# Dense bfloat16 operations and bytes a second. NVIDIA's data sheets of the SXM modules: "A100 80GB" (312 teraFLOPS,
# 2,039 GB/s), "H100" (989, 3.35 TB/s), "H200" (989, 4.8 TB/s); the sheets of the last two give twice the rate, for
# sparse matrices.
GPUS = {"A100 80GB": (312e12, 2.039e12), "H100 SXM": (989e12, 3.35e12), "H200 SXM": (989e12, 4.8e12)}
ELEMENT_SIZE = 2


def _qwen(hidden_size: int, intermediate_size: int, num_layers: int) -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=32768,
    )


def _llama(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )


# Shapes of Qwen2.5-14B and -32B, and of Llama 3.1 8B and 70B.
PAIRS = {
    "14B-to-32B": (_qwen(5120, 13824, 48), _qwen(5120, 27648, 64)),
    "8B-to-70B": (_llama(4096, 14336, 32, 32), _llama(8192, 28672, 80, 64)),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """
    What a prefill and a handoff do for one context.

    Args:
        length (`int`):
            Tokens.
        prefill_flops (`int`), prefill_bytes (`int`):
            Of the target's prefill: its products, its weights and what it caches.
        translation_flops (`int`), translation_bytes (`int`):
            Of all layer maps.
        step_bytes (`int`):
            Weights that the target reads for a few tokens.
        mapper_bytes (`int`), source_bytes (`int`), target_bytes (`int`):
            Of the mapper, and of the two caches.
    """

    length: int
    prefill_flops: int
    prefill_bytes: int
    translation_flops: int
    translation_bytes: int
    step_bytes: int
    mapper_bytes: int
    source_bytes: int
    target_bytes: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> dict[str, float]:
        """
        Bounds. A handoff is the translation, and two passes over the target's weights: for its first tokens, and for
        the last one, which is a part of a prefill.
        """
        step = self.step_bytes / bytes_per_second
        prefill = max(self.prefill_flops / flops_per_second, self.prefill_bytes / bytes_per_second)
        translation = max(self.translation_flops / flops_per_second, self.translation_bytes / bytes_per_second)
        handoff = translation + 2 * step
        return {"prefill": prefill, "translation": translation, "handoff": handoff, "ratio": prefill / handoff}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """
    Args:
        target ([`~transformers.PreTrainedModel`]):
            The target, without storage.
        source_geometry (`KVGeometry`), target_geometry (`KVGeometry`):
            What the two cache.
    """

    target: PreTrainedModel
    source_geometry: KVGeometry
    target_geometry: KVGeometry

    @classmethod
    def of(cls, source: PreTrainedConfig, target: PreTrainedConfig, num_layers: int | None = None) -> "Shapes":
        """Of two configs, with only some of the target's layers if so asked."""
        models = random_model(source, torch.bfloat16, "meta"), random_model(target, torch.bfloat16, "meta", num_layers)
        return cls(models[1], *map(geometry_on_meta, models))


def count_work(shapes: Shapes, length: int, num_source_layers: int) -> Work:
    """
    Args:
        shapes ([`Shapes`]):
            The pair.
        length (`int`):
            Tokens of the context.
        num_source_layers (`int`):
            Source layers that each map reads, beside the target's hidden states.
    """
    source, target = shapes.source_geometry, shapes.target_geometry
    hidden_size = shapes.target.config.get_text_config().hidden_size
    maps = source, target, map_specs(source, target, num_source_layers), hidden_size
    products = map_weights(*maps)
    step, cache = weight_bytes(shapes.target, ELEMENT_SIZE), kv_bytes(target, length, ELEMENT_SIZE)
    return Work(
        length=length,
        prefill_flops=prefill_flops(shapes.target, target, length),
        prefill_bytes=step + cache,
        translation_flops=2 * products * length,
        translation_bytes=translation_bytes(*maps, length, ELEMENT_SIZE),
        step_bytes=step,
        mapper_bytes=ELEMENT_SIZE * products,
        source_bytes=kv_bytes(source, length, ELEMENT_SIZE),
        target_bytes=cache,
    )


def table(works: dict[tuple[str, int], list[Work]]) -> str:
    """Markdown, a row for each pair, number of source layers and length."""
    lines = [
        "| pair | source layers | mapper | tokens | target's cache | prefill | translation | "
        + " | ".join(f"{name}: prefill, handoff, ratio" for name in GPUS)
        + " |",
        "|" + " --- |" * (7 + len(GPUS)),
    ]
    for (name, layers), rows in works.items():
        for work in rows:
            cells = [
                name,
                str(layers),
                f"{work.mapper_bytes / 1e9:.1f} GB",
                f"{work.length:,}",
                f"{work.target_bytes / 1e9:.2f} GB",
                f"{work.prefill_flops / 1e12:,.0f} TFLOP",
                f"{work.translation_flops / 1e12:,.1f} TFLOP",
            ]
            for rates in GPUS.values():
                times = work.seconds(*rates)
                cells.append(f"{times['prefill']:.3f} s, {times['handoff']:.3f} s, {times['ratio']:.1f}x")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(
    source: PreTrainedConfig,
    target: PreTrainedConfig,
    lengths: list[int],
    num_source_layers: int,
    num_layers: int | None,
    dtype: torch.dtype,
    device: torch.device,
    runs: int,
) -> dict:
    """
    Run a pair with random weights.

    Returns:
        `dict`: The machine's own rates, and for each length medians of seconds, as measured and scaled up to all
        layers, and how much of the bound at the machine's own rates that is.
    """
    total = target.get_text_config().num_hidden_layers
    model = random_model(target, dtype, device, num_layers)
    shapes = Shapes.of(source, target, num_layers)
    geometries = shapes.source_geometry, KVGeometry.from_model(model)
    mapper = random_mapper(*geometries, target.get_text_config().hidden_size, num_source_layers, dtype, device)
    rates = machine_rates(dtype, device, size=8192 if device.type != "cpu" else 1024)
    scale = total / len(geometries[1].layers)
    results: dict = {"flops_per_second": rates[0], "bytes_per_second": rates[1], "scale": scale, "lengths": {}}
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        input_ids = torch.randint(target.get_text_config().vocab_size, (1, length), generator=generator)
        source_kv = random_source_kv(geometries[0], input_ids, dtype, device)
        times: dict[str, list[float]] = {"prefill": [], "bind": [], "translation": []}
        for run in range(runs + 1):
            measured = time_prefill(model, input_ids), *time_handoff(source_kv, mapper, model)
            for name, value in zip(times, measured, strict=True):
                times[name] += [value] if run else []  # the first one warms up
        medians = {name: statistics.median(values) for name, values in times.items()}
        bound = count_work(shapes, length, num_source_layers).seconds(*rates)
        results["lengths"][length] = {
            "seconds": medians,
            "scaled": {name: value * scale for name, value in medians.items()},
            "ratio": medians["prefill"] / (medians["bind"] + medians["translation"]),
            "share_of_bound": {name: bound[name] / medians[name] for name in ("prefill", "translation")},
        }
        print(f"{length:8} tokens: {json.dumps(results['lengths'][length])}", file=sys.stderr, flush=True)
    return results


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--num-source-layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--measure", metavar="PAIR", help=f"run it here: {', '.join(PAIRS)}, or `configs`")
    parser.add_argument("--source-config", help="folder or Hub id of a config, for `--measure configs`")
    parser.add_argument("--target-config")
    parser.add_argument("--layers", type=int, help="run only so many of the target's layers")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)

    results: dict = {"gpus": GPUS}
    if options.measure:
        if options.measure == "configs":
            configs = tuple(AutoConfig.from_pretrained(n) for n in (options.source_config, options.target_config))
        else:
            configs = PAIRS[options.measure]
        dtype, device = getattr(torch, options.dtype), torch.device(options.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        results = {"machine": name, "dtype": options.dtype, "pair": options.measure, "layers": options.layers}
        for number in options.num_source_layers:
            results[f"{number} source layers"] = measure(
                *configs, options.lengths, number, options.layers, dtype, device, options.runs
            )
    else:
        pairs = {name: Shapes.of(*configs) for name, configs in PAIRS.items()}
        works = {
            (name, number): [count_work(shapes, length, number) for length in options.lengths]
            for name, shapes in pairs.items()
            for number in options.num_source_layers
        }
        print(table(works))
        results["work"] = {
            f"{name}, {number} source layers": [
                dataclasses.asdict(work) | {"seconds": {gpu: work.seconds(*rates) for gpu, rates in GPUS.items()}}
                for work in rows
            ]
            for (name, number), rows in works.items()
        }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

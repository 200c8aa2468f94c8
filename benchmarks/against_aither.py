"""
aither-kvcache 2.4.1 (numpy) beside this package, on the pairs that it can do: two models with one tokenizer.

    python benchmarks/against_aither.py DATA

Both fit on the same tokens of the same texts and hold out the same ones. Its mapper is measured on the same positions
through the same code as ours: its weights are copied into a mapper of ours, which is first held against what its own
`translate_cache` gives. Once as it is, with every token translated, and once with the first tokens read by the target,
as ours have it. Times are of its own code, from the source's cache to a cache of the target.

The package is fetched from PyPI into the folder of the demo models the first time; nothing is installed beside.
"""

import dataclasses
import hashlib
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from pairs.made_models import SMOLLM2, demo, smollm2_finetuned, smollm2_pruned
from pairs.measuring import (
    HEADER,
    Pair,
    add_improvements,
    evaluate,
    held_out_rows,
    ids_of_context,
    improved_as_asked,
    make_parser,
    median_seconds,
    parse,
    print_table,
    ready,
    table_row,
    timed,
    translation_steps,
)

from hf_kvtransfer import KVMapper, KVMapperConfig, SourceKV, fit_mapper
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import filled_cache
from hf_kvtransfer.demo_models import demo_model_path, run_pip
from hf_kvtransfer.fidelity.report import FidelityReport
from hf_kvtransfer.fidelity.statistics import figures
from hf_kvtransfer.translation import Translation


PACKAGE = "aither-kvcache==2.4.1"
PAIRS = {"finetuned": smollm2_finetuned, "pruned": smollm2_pruned}
# As `fit_mapper` has them by default.
MAX_LENGTH, HELD_OUT_EVERY, SINKS = 1024, 10, 4
AS_IT_IS, WITH_SINKS = "aither", "aither, first tokens native"


def load_aither() -> SimpleNamespace:
    """The modules of the package that are used here."""
    folder = demo_model_path(SMOLLM2).parents[1] / PACKAGE
    if not folder.is_dir():
        run_pip(["install", "--no-deps", "--target", str(folder), PACKAGE])
    sys.path.insert(0, str(folder))
    names = ("capture", "fit", "geometry", "pack", "transfer")
    return SimpleNamespace(**{name: importlib.import_module(f"aither_kvcache.kvtransfer.{name}") for name in names})


class Aither:
    """Its mapper of a pair: captured, fitted and loaded with its own code, in a folder that may be deleted then."""

    def __init__(self, pair: Pair, texts: list[str], top_k: int, folder: Path):
        self.modules, self.pair = load_aither(), pair
        sides = ((pair.source, pair.source_tokenizer), (pair.target, pair.target_tokenizer))
        self.source, self.target = (
            self.modules.geometry.KVGeometry.from_hf(model.config._name_or_path, model.config, tokenizer, "float32")
            for model, tokenizer in sides
        )
        start = time.perf_counter()
        self._capture(texts, folder)
        self.modules.fit.fit_pack(folder, folder / "pack", top_k=top_k)
        self.fit_seconds = time.perf_counter() - start
        self.num_bytes = (folder / "pack" / "mapper.npz").stat().st_size
        self.pack = self.modules.pack.load_pack(
            folder / "pack", live_source=self.source, live_target=self.target, require_acceptance=False
        )

    def _capture(self, texts: list[str], folder: Path):
        """What its `capture_pair` writes, of whole texts in place of chunks of one length."""
        verdict = self.modules.geometry.check_pair(self.source, self.target)
        verdict.raise_if_blocked()
        parts, digest = {}, hashlib.sha256()
        for number, text in enumerate(texts, start=1):
            split = "val" if number % HELD_OUT_EVERY == 0 else "train"
            input_ids = torch.tensor([encode_with_spans(self.pair.source_tokenizer, text)[0][:MAX_LENGTH]])
            digest.update(input_ids.numpy().tobytes())
            for side, model, geometry in zip(
                ("src", "tgt"), self.pair.models, (self.source, self.target), strict=True
            ):
                states = self._states(filled_cache(model, input_ids), geometry)
                for role, rows in zip("kv", states, strict=True):
                    parts.setdefault((split, side, role), []).append(rows[SINKS:])
        tokens = {split: sum(map(len, parts[split, "src", "k"])) for split in ("train", "val")}
        for split, side, role in list(parts):
            np.save(folder / f"{split}_{side}_{role}.npy", np.concatenate(parts.pop((split, side, role))))
        self.modules.capture.CaptureManifest(
            source=self.source.to_dict(),
            target=self.target.to_dict(),
            seq_len=MAX_LENGTH,
            n_train_tokens=tokens["train"],
            n_val_tokens=tokens["val"],
            n_train_docs=len(texts) - len(texts) // HELD_OUT_EVERY,
            n_val_docs=len(texts) // HELD_OUT_EVERY,
            corpus_sha256=digest.hexdigest(),
            regime_flags=verdict.regime_flags,
            created_at=time.time(),
        ).write(folder)

    def _states(self, cache, geometry) -> tuple[np.ndarray, np.ndarray]:
        """Position-free keys, and values, `[tokens, layers * width]`."""
        layers = self.modules.capture._extract_kv(cache)
        return self.modules.capture._stack_layers(layers, geometry, np.arange(layers[0][0].shape[2]))

    def translate(self, cache):
        """Its way from a cache of the source to one of the target."""
        keys, values = (states.astype(np.float32) for states in self._states(cache, self.source))
        layers = self.modules.transfer.translate_cache(keys, values, self.pack, np.arange(len(keys)))
        return self.modules.transfer._to_cache(layers, torch, "cpu", torch.float32)

    def as_mapper(self, config: KVMapperConfig) -> KVMapper:
        """Its weights in a mapper of ours; `config` says which pair it is for."""
        maps = [{role: self.pack.layer_map(role, i) for role in "kv"} for i in range(self.target.n_layers)]
        read = [sorted({*layer["k"][2], *layer["v"][2]}) for layer in maps]
        mapper = KVMapper(
            KVMapperConfig(
                source=config.source,
                target=config.target,
                layers=[{"kind": "linear", "source_layers": layers} for layers in read],
                sink_tokens=0,
            )
        )
        width = self.source.per_layer_width
        with torch.no_grad():
            for layer, layers, own in zip(maps, read, mapper.layers, strict=True):
                # Keys are made of keys, and values of values.
                halves = zip("kv", own.weight.chunk(2), own.bias.chunk(2), strict=True)
                for half, (role, weight, bias) in enumerate(halves):
                    matrix, offset, source_layers = layer[role]
                    bias.copy_(torch.from_numpy(offset))
                    for place, source_layer in enumerate(source_layers):
                        column = (2 * layers.index(source_layer) + half) * width
                        block = matrix[place * width : (place + 1) * width]
                        weight[:, column : column + width] = torch.from_numpy(block.T.astype(np.float32))
        return mapper.eval()

    def check_same(self, mapper: KVMapper, text: str):
        """Its `translate_cache` and the mapper with its weights must give the same cache."""
        source_ids, _ = ids_of_context(self.pair, text, 128)
        cache = filled_cache(self.pair.source, source_ids)
        source_kv = SourceKV.from_cache(cache, self.pair.source, source_ids, tokenizer=self.pair.source_tokenizer)
        translation = Translation(
            source_kv, mapper, self.pair.target, target_tokenizer=self.pair.target_tokenizer, tail_tokens=0
        )
        for i, layer in enumerate(self.translate(cache).layers):
            ours = translation.layer(i, 0, translation.length, torch.device("cpu"), torch.float32)
            for theirs, own in zip((layer.keys, layer.values), ours, strict=True):
                error = (theirs - own).norm() / theirs.norm()
                # Its states are rounded to float16 on the way.
                assert error < 2e-3, f"layer {i}: the copied weights give another cache, by {error:.1e}"


def on_floor(report: FidelityReport, floor: FidelityReport) -> dict:
    """The figures of a report, with the gap measured from another one's native first tokens."""
    results = [
        dataclasses.replace(row, arms=row.arms | {"no_context": other.arms["no_context"]})
        for row, other in zip(report.results, floor.results, strict=True)
    ]
    return figures(results)


def our_settings(num_bytes: int) -> dict[str, dict]:
    """What we fit beside a mapper of so many bytes."""
    return {
        "ours, no larger": {"budget": num_bytes},
        "ours, identity of rank 64": {"kind": "identity", "native_layers": None, "rank": 64},
    }


def compare(name: str, pair: Pair, texts: list[str], held_out: list[dict], arguments) -> list[dict]:
    """Records of all mappers of one pair, ours behind aither's."""
    with tempfile.TemporaryDirectory() as folder:
        aither = Aither(pair, texts, arguments.top_k, Path(folder))
    records = [
        {"mapper": f"{name}: {label}", "megabytes": aither.num_bytes / 1e6, "fit_seconds": aither.fit_seconds}
        for label in (AS_IT_IS, WITH_SINKS)
    ]
    mappers = []
    for label, settings in our_settings(aither.num_bytes).items():
        mapper, seconds = timed(fit_mapper, *pair.models, texts, **pair.tokenizers, max_tokens=None, **settings)
        mapper, record = improved_as_asked(mapper, pair, texts, arguments, settings, seconds)
        records.append({"mapper": f"{name}: {label}"} | record)
        mappers.append(ready(mapper, pair))
    theirs = aither.as_mapper(mappers[0].config)
    aither.check_same(theirs, held_out[0]["text"])

    for record in records:
        record["results"] = []
    for context in arguments.contexts:
        rows = held_out_rows(held_out, pair.target_tokenizer, context)
        limit = {"limit": arguments.documents}
        with_sinks = evaluate(theirs, pair, rows, context, sink_tokens=SINKS, **limit)
        found = [on_floor(evaluate(theirs, pair, rows, context, sink_tokens=0, **limit), with_sinks)]
        found += [with_sinks.figures, *(evaluate(mapper, pair, rows, context, **limit).figures for mapper in mappers)]

        source_ids, _ = ids_of_context(pair, rows[0]["text"], context)
        cache = filled_cache(pair.source, source_ids)
        steps = {"aither": lambda cache=cache: aither.translate(cache)}
        for i, mapper in enumerate(mappers):
            own = translation_steps(mapper, pair, rows[0]["text"], context)
            steps |= {"prefill": own["prefill"], f"unrotate {i}": own["unrotate"], f"translate {i}": own["translate"]}
        seconds = median_seconds(steps, arguments.runs)
        # Both from the source's cache.
        ours = [seconds[f"unrotate {i}"] + seconds[f"translate {i}"] for i in range(len(mappers))]
        for record, measured, translate in zip(records, found, [seconds["aither"]] * 2 + ours, strict=True):
            times = {"prefill": seconds["prefill"], "translate": translate}
            record["results"].append({"context": context, "figures": measured, "seconds": times})
    return records


def main():
    parser = make_parser(__doc__, texts=100)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS), help="pairs")
    parser.add_argument("--top-k", type=int, default=8, help="source layers that aither reads, 8 as it comes")
    add_improvements(parser)
    arguments, rows, held_out, texts = parse(parser)
    records = []
    for name in arguments.only:
        records += compare(name, Pair.load(demo(SMOLLM2), PAIRS[name], rows), texts, held_out, arguments)
        if arguments.output:
            arguments.output.write_text(json.dumps(records, indent=2) + "\n")
    shown = [table_row(record, result) for record in records for result in record["results"]]
    print_table(f"{PACKAGE}, both fitted on {len(texts)} texts, {torch.get_num_threads()} threads", HEADER, shown)


if __name__ == "__main__":
    main()

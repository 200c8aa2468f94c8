"""
What each part of a mapper is worth: rows that differ from the base in one thing, measured on the same held-out text.

    python benchmarks/ablation.py DATA --output ablation.jsonl

Each row is appended to the output as soon as it is measured, and what is there already is not measured again: the same
command goes on after an interruption. Mappers, the sums of an interrupted fit and what the models make of the text,
which only the first fit lets them read, lie in a folder beside it. Rows are compared with the base, which is measured
if it is not there.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from pairs.made_models import GEMMA, SMOLLM2, demo
from pairs.measuring import (
    HEADER,
    Pair,
    improved,
    make_parser,
    measure,
    parse,
    print_table,
    ready,
    spread,
    table_row,
    timed,
)

from hf_kvtransfer import KVMapper, fit_mapper
from hf_kvtransfer.fidelity.statistics import shares_of_first


# Of `fit_mapper`, and what is done with the fitted mapper: `share` of the texts, `readout`, `epochs`, `bits`.
BASE = {"kind": "linear", "native_layers": 0, "num_source_layers": 4}
DISTILLED = {"epochs": 1}
ROWS = {
    "base": {},
    # Source layers are chosen by random projections: what lies between these rows and the base is chance.
    "another seed": {"seed": 1},
    "a third seed": {"seed": 2},
    "no token features": {"token_features": False},
    **{f"tokens before: {n}": {"previous_tokens": n} for n in (1, 3)},
    "native layers: none": {"native_layers": None},
    **{f"native layers: up to {m}": {"native_layers": m} for m in (1, 2, 3)},
    **{f"source layers: {n}": {"num_source_layers": n} for n in (1, 2, 8, 12)},
    "head-matched": {"kind": "head_matched"},
    "low rank": {"kind": "low_rank"},
    "residual MLP": {"kind": "residual_mlp"},
    "readout calibrated": {"readout": True},
    "distilled": DISTILLED,
    "distilled, tokens before: 3": {"previous_tokens": 3} | DISTILLED,
    "distilled, residual MLP": {"kind": "residual_mlp"} | DISTILLED,
    "distilled, head-matched": {"kind": "head_matched"} | DISTILLED,
    "half of the text": {"share": 0.5},
    "twice the text": {"share": 2},
    "four times the text": {"share": 4},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "4 bits, source layers: 8": {"num_source_layers": 8, "bits": 4},
    "4 bits, source layers: 12": {"num_source_layers": 12, "bits": 4},
}


class Ablation:
    """Makes and measures rows, and remembers what is done."""

    def __init__(self, arguments, pair: Pair, rows: list[dict], held_out: list[dict]):
        self.arguments, self.pair, self.rows, self.held_out = arguments, pair, rows, held_out
        self.output = arguments.output
        self.folder = self.output.with_suffix(".mappers")

    def record(self, name: str) -> dict:
        """The row of this name, measured now if it is not there."""
        asked = self._asked(name)
        done = [json.loads(line) for line in self.output.open(encoding="utf-8")] if self.output.exists() else []
        for record in done:
            if record["asked"] == asked:
                return record
        mapper, seconds = self._mapper(asked["settings"])
        record = {
            "mapper": name,
            "asked": asked,
            "megabytes": mapper.num_bytes() / 1e6,
            "fit_seconds": seconds,
        }
        measuring = self.arguments
        record["results"] = measure(
            ready(mapper, self.pair), self.pair, self.held_out, measuring.contexts, measuring.documents, measuring.runs
        )
        with self.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def _asked(self, name: str) -> dict:
        """All that a row depends on."""
        names = ("texts", "documents", "contexts", "runs", "threads", "source", "target")
        data = hashlib.sha256(json.dumps([self.rows, self.held_out]).encode()).hexdigest()
        return {"settings": BASE | ROWS[name], "data": data} | {name: getattr(self.arguments, name) for name in names}

    def _mapper(self, settings: dict) -> tuple[KVMapper, float]:
        settings = dict(settings)
        share, readout, epochs, bits = (
            settings.pop(name, default)
            for name, default in (("share", 1), ("readout", False), ("epochs", 0), ("bits", 0))
        )
        texts = [row["text"] for row in spread(self.rows, round(self.arguments.texts * share))]
        mapper, seconds, folder = self._fitted(settings, texts)
        training = folder.with_suffix(f".distillation-{epochs}-{readout}") if epochs else None
        mapper, more = improved(mapper, self.pair, texts, readout=readout, epochs=epochs, checkpoint=training)
        return (mapper.quantize(bits) if bits else mapper), seconds + more

    def _fitted(self, settings: dict, texts: list[str]) -> tuple[KVMapper, float, Path]:
        """
        A mapper, the seconds that its fit took, and where it is saved: several rows begin with the same fit, and a
        resumed run with an earlier one's.
        """
        key = hashlib.sha256(json.dumps([self.arguments.source, self.arguments.target, settings, texts]).encode())
        folder = self.folder / key.hexdigest()[:16]
        if not folder.is_dir():
            sums = folder.with_suffix(".checkpoint")
            options = settings | {"checkpoint": sums, "keep_states": self.folder / "states"}
            mapper, seconds = timed(fit_mapper, *self.pair.models, texts, **self.pair.tokenizers, **options)
            mapper.config.fit["seconds"] = seconds
            unfinished = folder.with_suffix(".partial")
            mapper.save_pretrained(unfinished)
            unfinished.rename(folder)
        mapper = KVMapper.from_pretrained(folder)
        return mapper, mapper.config.fit["seconds"], folder


def more_than(base: dict, result: dict) -> str:
    """What more of the gap is recovered than in the base, with the interval of a paired bootstrap over documents."""
    gains = [
        (own["no_context"] - own["native"], own["translated"] - result["losses"][document]["translated"])
        for document, own in base["losses"].items()
    ]
    shares = shares_of_first(np.array(gains))
    return "-" if shares is None else "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**shares[1])


def main():
    parser = make_parser(__doc__, texts=60, documents=40)
    parser.add_argument("--source", choices=(SMOLLM2, GEMMA), default=SMOLLM2)
    parser.add_argument("--target", choices=(SMOLLM2, GEMMA), default=GEMMA)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(map(repr, ROWS))}")
    parser.set_defaults(contexts=[256], output=Path("ablation.jsonl"))
    arguments, rows, held_out, _ = parse(parser)
    ablation = Ablation(arguments, Pair.load(demo(arguments.source), demo(arguments.target), rows), rows, held_out)
    names = list(ROWS) if arguments.only is None else arguments.only
    records = [ablation.record(name) for name in names]
    base = ablation.record("base")
    shown = [
        [*table_row(record, result), more_than(own, result)]
        for record in records
        for own, result in zip(base["results"], record["results"], strict=True)
    ]
    title = f"{arguments.source} to {arguments.target}, {arguments.texts} texts"
    print_table(title, (*HEADER, "more than the base"), shown)


if __name__ == "__main__":
    main()

"""What the benchmarks share: text, fitting, measuring on held-out text, timing, tables."""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_kvtransfer import (
    KVMapper,
    SourceKV,
    calibrate_readout,
    distill_mapper,
    evaluate_mapper,
    fit_mapper,
    train_residuals,
)
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import filled_cache, read_into_cache
from hf_kvtransfer.fidelity.report import FidelityReport
from hf_kvtransfer.translation import Translation


CONTINUATION = 64  # tokens that are scored behind each context
_SHOWN_WIDTH = 240  # of tables in a pipe or a file

Loader = Callable[[list[dict]], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


@dataclasses.dataclass
class Pair:
    """Two models with their tokenizers, as most functions of the package take them."""

    source: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    target_tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, source: Loader, target: Loader, rows: list[dict]) -> "Pair":
        """`rows` are for models that have to be trained first."""
        return cls(*source(rows), *target(rows))

    @property
    def models(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        return self.source, self.target

    @property
    def tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        return {"source_tokenizer": self.source_tokenizer, "target_tokenizer": self.target_tokenizer}


def read_rows(folder: Path) -> tuple[list[dict], list[dict]]:
    """Rows of calibration.jsonl to fit on, and its last tenth, held out."""
    rows = [json.loads(line) for line in (folder / "calibration.jsonl").open(encoding="utf-8")]
    cut = len(rows) - round(len(rows) * 0.1)
    return rows[:cut], rows[cut:]


def spread(rows: Sequence, count: int) -> list:
    """At most `count` rows, at even distances."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def held_out_rows(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, context_tokens: int) -> list[dict]:
    """
    Rows for `evaluate_mapper` that are long enough: consecutive pieces of one source, joined by a blank line.

    What is left over at the end of a source is dropped.
    """
    documents, pieces = [], {}
    for row in rows:
        own = pieces.setdefault(row["source"], [])
        own.append(row["text"])
        text = "\n\n".join(own)
        if len(tokenizer(text).input_ids) >= context_tokens + CONTINUATION:
            documents.append({"text": text, "capability": row["source"]})
            own.clear()
    return documents


def timed(function: Callable, *arguments, **options) -> tuple[Any, float]:
    """What a function returns, and the seconds it took."""
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def improved(
    mapper: KVMapper,
    pair: Pair,
    texts: list[str],
    *,
    readout: bool = False,
    epochs: int = 0,
    checkpoint: Path | None = None,
) -> tuple[KVMapper, float]:
    """A fitted mapper, its MLPs trained, readout-calibrated and distilled for `epochs`, and the seconds for it."""
    storage, start = mapper.config.storage, time.perf_counter()
    mapper = mapper if storage is None else mapper.dequantize()
    if any(spec is not None and spec["kind"] == "residual_mlp" for spec in mapper.config.layers):
        mapper = train_residuals(mapper, *pair.models, texts, **pair.tokenizers)
    if readout:
        mapper = calibrate_readout(mapper, *pair.models, texts, **pair.tokenizers)
    if epochs:
        mapper = distill_mapper(mapper, *pair.models, texts, **pair.tokenizers, epochs=epochs, checkpoint=checkpoint)
    if storage is not None and mapper.config.storage is None:
        mapper = mapper.quantize(**storage)
    return mapper, time.perf_counter() - start


def improved_as_asked(
    mapper: KVMapper, pair: Pair, texts: list[str], arguments: argparse.Namespace, settings: dict, seconds: float
) -> tuple[KVMapper, dict[str, Any]]:
    """
    A fitted mapper improved as the arguments of [`add_improvements`] say, and what there is to record about it.
    `settings` are those of its fit, which took so many `seconds`.
    """
    # An identity has no value maps, and without a correction nothing at all to improve.
    improvements: dict[str, Any] = {
        "readout": arguments.readout and settings.get("kind") != "identity",
        "epochs": arguments.distill if mapper.num_bytes() else 0,
    }
    mapper, more = improved(mapper, pair, texts, **improvements)
    return mapper, {
        "settings": settings | improvements,
        "texts": len(texts),
        "megabytes": mapper.num_bytes() / 1e6,
        "fit_seconds": seconds + more,
    }


def evaluate(mapper: KVMapper, pair: Pair, rows: list[dict], context_tokens: int, **options) -> FidelityReport:
    """All arms on held-out rows, [`CONTINUATION`] tokens scored. The probe is left out, which has its own evidence."""
    return evaluate_mapper(
        mapper,
        *pair.models,
        rows,
        **pair.tokenizers,
        context_tokens=context_tokens,
        continuation_tokens=CONTINUATION,
        probe_documents=0,
        corrupted_documents=0,
        **options,
    )


def ids_of_context(pair: Pair, text: str, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The source's and the target's ids of the beginning of a text that has so many tokens of the target."""
    _, spans = encode_with_spans(pair.target_tokenizer, text)
    context = text[: spans[context_tokens - 1][1]]
    source_ids, target_ids = (
        torch.tensor([encode_with_spans(tokenizer, context)[0]]) for tokenizer in pair.tokenizers.values()
    )
    return source_ids, target_ids


def translation_steps(mapper: KVMapper, pair: Pair, text: str, context_tokens: int) -> dict[str, Callable[[], Any]]:
    """
    What is timed with the source's cache in hand: the target's own `prefill`; `unrotate`, which makes position-free
    states of the source's cache and can be done once for all targets; `translate`, from aligning the tokenizers to
    the last layer of the target.
    """
    source_ids, target_ids = ids_of_context(pair, text, context_tokens)
    cache = filled_cache(pair.source, source_ids)
    unrotate = functools.partial(SourceKV.from_cache, cache, pair.source, source_ids, tokenizer=pair.source_tokenizer)
    source_kv = unrotate()

    def prefill():
        read_into_cache(pair.target, DynamicCache(config=pair.target.config), target_ids)

    def translate():
        translation = Translation(source_kv, mapper, pair.target, target_tokenizer=pair.target_tokenizer)
        for layer_idx, layer in enumerate(translation.geometry.layers):
            if layer is not None:
                translation.layer(layer_idx, 0, translation.length, *translation.default_placement)

    return {"prefill": prefill, "unrotate": unrotate, "translate": translate}


def median_seconds(steps: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Medians of interleaved runs, behind one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs + 1):
        for name, step in steps.items():
            times[name].append(timed(step)[1])
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def measure(mapper: KVMapper, pair: Pair, held_out: list[dict], contexts: list[int], limit: int, runs: int) -> list:
    """For each length of the context a dict of the figures, the losses of each document by arm, and the seconds."""
    results = []
    for context in contexts:
        rows = held_out_rows(held_out, pair.target_tokenizer, context)
        steps = translation_steps(mapper, pair, rows[0]["text"], context)
        report = evaluate(mapper, pair, rows, context, limit=limit)
        results.append(
            {
                "context": context,
                "figures": report.figures,
                "losses": {
                    row.document: {arm: score.loss for arm, score in row.arms.items()} for row in report.results
                },
                "seconds": median_seconds(steps, runs),
            }
        )
    return results


def ready(mapper: KVMapper, pair: Pair) -> KVMapper:
    """A copy that multiplies without converting weights first; quantised ones are made dense at each use anyway."""
    return mapper if mapper.config.storage is not None else mapper.dequantize(pair.target.dtype)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]):
    console = Console(width=None if sys.stdout.isatty() else _SHOWN_WIDTH, highlight=False)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def share(gap: dict[str, float] | None) -> str:
    """A gap recovered with its interval; a dash where the context does not clearly help, or too little was read."""
    return "-" if gap is None else f"{gap['value']:.3f} [{gap['low']:.3f}, {gap['high']:.3f}]"


HEADER = (
    "mapper",
    "context",
    "MB",
    "fit, s",
    "loss native",
    "translated",
    "wrong document",
    "no context",
    "gap recovered",
    "wrong document's",
    "as native",
    "translation, s",
    "prefill, s",
    "share",
)


def table_row(record: dict, result: dict) -> list[str]:
    """Cells under [`HEADER`] for one length of context."""
    arms, seconds = result["figures"]["arms"], result["seconds"]
    losses = (f"{arms[arm]['loss']:.3f}" for arm in ("native", "translated", "other_document", "no_context"))
    return [
        record["mapper"],
        f"{result['context']:,}",
        f"{record['megabytes']:.2f}",
        f"{record['fit_seconds']:.0f}",
        *losses,
        share(arms["translated"]["gap_recovered"]),
        share(arms["other_document"]["gap_recovered"]).split(" ")[0],
        f"{arms['translated']['agreement']:.3f}",
        f"{seconds['translate']:.3f}",
        f"{seconds['prefill']:.3f}",
        f"{seconds['translate'] / seconds['prefill']:.2f}",
    ]


def parse_setting(text: str) -> tuple[str, Any]:
    """`name=value` of an argument of `fit_mapper`; the value is JSON or else a word."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not like native_layers=3 or budget=45MB")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def make_parser(description: str, texts: int = 200, documents: int = 60) -> argparse.ArgumentParser:
    """Arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with calibration.jsonl, whose last tenth is held out")
    parser.add_argument("--texts", type=int, default=texts, help="rows to fit on, at even distances")
    parser.add_argument("--documents", type=int, default=documents, help="held-out documents of each length, at most")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024], help="target tokens")
    parser.add_argument("--runs", type=int, default=5, help="of each timing, interleaved")
    parser.add_argument("--threads", type=int, help="as many as torch takes by default")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    return parser


def add_improvements(parser: argparse.ArgumentParser):
    parser.add_argument("--readout", action="store_true", help="calibrate what the target's attention reads out")
    parser.add_argument("--distill", type=int, default=0, metavar="EPOCHS", help="train through the frozen target")


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[dict], list[dict], list[str]]:
    """The arguments, the rows to fit on, the held-out rows, and the texts of those that are fitted on."""
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows, held_out = read_rows(arguments.data)
    return arguments, rows, held_out, [row["text"] for row in spread(rows, arguments.texts)]


def main(description: str, source: Loader, target: Loader, mappers: dict[str, dict[str, Any]]):
    """
    The command of one pair.

    Args:
        description (`str`):
            Of the command, for `--help`.
        source (`Loader`), target (`Loader`):
            The two models.
        mappers (`dict[str, dict]`):
            Arguments of `fit_mapper` for each mapper that is measured, by its name.
    """
    parser = make_parser(description)
    parser.add_argument("--only", nargs="+", choices=mappers, metavar="MAPPER", help=f"of {', '.join(mappers)}")
    parser.add_argument(
        "--fit", type=parse_setting, nargs="+", metavar="NAME=VALUE", help="one mapper of these settings instead"
    )
    add_improvements(parser)
    parser.add_argument("--mapper", type=Path, help="measure the mapper in this folder, and fit none")
    parser.add_argument("--save", type=Path, help="folder for the mappers that are made")
    arguments, rows, held_out, texts = parse(parser)
    if arguments.fit:
        mappers = {" ".join(f"{name}={value}" for name, value in arguments.fit): dict(arguments.fit)}
    elif arguments.only:
        mappers = {name: mappers[name] for name in arguments.only}
    if arguments.mapper:
        mappers = {arguments.mapper.name: {}}
    pair = Pair.load(source, target, rows)

    records = []
    for name, settings in mappers.items():
        if arguments.mapper:
            mapper, seconds = KVMapper.from_pretrained(arguments.mapper), 0.0
        else:
            mapper, seconds = timed(fit_mapper, *pair.models, texts, **pair.tokenizers, **settings)
        mapper, record = improved_as_asked(mapper, pair, texts, arguments, settings, seconds)
        if arguments.save:
            mapper.save_pretrained(arguments.save / name)
        record["mapper"] = name
        record["results"] = measure(
            ready(mapper, pair), pair, held_out, arguments.contexts, arguments.documents, arguments.runs
        )
        records.append(record)
        if arguments.output:  # after each, so that an interruption leaves the others
            arguments.output.write_text(json.dumps(records, indent=2) + "\n")
    shown = [table_row(record, result) for record in records for result in record["results"]]
    title = f"{Path(sys.argv[0]).stem}, fitted on {len(texts)} texts, {torch.get_num_threads()} threads"
    print_table(title, HEADER, shown)

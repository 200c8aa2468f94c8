"""
Chunks that were read earlier, each alone, placed one after another in a new prompt: what is lost, and how much of it
comes back if the target reads some of their tokens again.

Scored is the loss on answers, after questions of four kinds (see chunk_questions.py). By default the model reads
chunks for itself, so that nothing is lost but what chunks would have seen in each other; with --mapper SmolLM2 reads
them for Gemma 3. Questions that OUTPUT.json has already are not asked again, so that a run can be continued.

    python -m benchmarks.chunks DATA/calibration.jsonl OUTPUT
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hf_kvtransfer import FidelityGate, SourceKV, adapter_mapper
from hf_kvtransfer.compat import read_into_cache, token_losses
from hf_kvtransfer.demo_models import load_demo_model
from hf_kvtransfer.fidelity.prompts import PromptEncoder
from hf_kvtransfer.fidelity.statistics import MIN_DOCUMENTS, resampled_totals, share_intervals
from hf_kvtransfer.reuse import ReuseQuestion, ReuseRequest, TranslatedChunks
from hf_kvtransfer.reuse.score import FLOOR, FULL
from hf_kvtransfer.rotary import Rotary

from . import chunk_questions


KINDS: dict[str, Callable[..., list[ReuseQuestion]]] = {
    "one source": chunk_questions.one_source,
    "two sources": chunk_questions.two_sources,
    "references": chunk_questions.references,
    "continuation": chunk_questions.continuations,
}
OLD, NEW = "old positions", "new positions"
FIRST_TOKENS = 8
FIRST = f"first {FIRST_TOKENS} read again"
EFFORTS = (0.05, 0.15, 0.5)
# Questions of each kind, the first ones, of which operations are counted: that takes longer than all else.
COUNTED = 2


class OldPositions(TranslatedChunks):
    """Chunks one after another as they were read: the tokens of each at positions from 0."""

    def prepare(self, request: ReuseRequest, built: list[SourceKV]) -> Cache:
        cache, rotary = DynamicCache(config=self.target.config), Rotary.from_model(self.target)
        for layer_idx, layer in enumerate(built[0].geometry.layers):
            if layer is not None:
                keys = [rotary.at(kv.position_ids).apply(kv.key_states(layer_idx), layer_idx) for kv in built]
                values = [kv.value_states(layer_idx) for kv in built]
                cache.update(torch.cat(keys, 2), torch.cat(values, 2), layer_idx)
        return cache


class QuestionUnknown(TranslatedChunks):
    """As if the prompt ended with the chunks: what is read again is what the first layers find furthest off."""

    def prepare(self, request: ReuseRequest, built: list[SourceKV]) -> Cache:
        context = request.ranges[-1][1]
        return super().prepare(dataclasses.replace(request, input_ids=request.input_ids[:, : context + 1]), built)


def effort_name(effort: float, question: bool = True) -> str:
    return f"{effort:.0%} read again{'' if question else ', by deviation'}"


def load(
    mapper: str | None, efforts: Sequence[float]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, TranslatedChunks]]:
    """The model that answers, its tokenizer, and the methods by name. Old positions are for a model and itself."""
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m") if mapper else (source, source_tokenizer)
    pair = source, target, mapper or adapter_mapper(source, target)
    options: dict[str, Any] = {"source_tokenizer": source_tokenizer, "target_tokenizer": target_tokenizer}
    options["gate"] = FidelityGate(strict=False)  # this is about what is lost
    methods = {} if mapper else {OLD: OldPositions(*pair, **options)}
    methods[NEW] = TranslatedChunks(*pair, **options)
    methods[FIRST] = TranslatedChunks(*pair, reread_tokens=FIRST_TOKENS, **options)
    for effort in efforts:
        methods[effort_name(effort)] = TranslatedChunks(*pair, effort=effort, **options)
        methods[effort_name(effort, question=False)] = QuestionUnknown(*pair, effort=effort, **options)
    return target, target_tokenizer, methods


def ask(
    question: ReuseQuestion, target: PreTrainedModel, tokenizer, methods: dict[str, TranslatedChunks], count: bool
) -> dict:
    """Loss on the answer, and if they are to be counted operations until it is read, of each method and control."""
    request = ReuseRequest.make(question, PromptEncoder(tokenizer))
    built = [next(iter(methods.values())).build(chunk) for chunk in question.chunks]
    empty = partial(DynamicCache, config=target.config)
    arms: dict[str, tuple[torch.Tensor, Callable[[], Cache]]] = {
        FULL: (request.input_ids, empty),
        FLOOR: (request.without_context(), empty),
    }
    for name, method in methods.items():
        arms[name] = (request.input_ids, partial(method.prepare, request, built))
    answer = torch.tensor([request.answer_ids])
    row: dict = {"tokens": answer.shape[1], "context": request.ranges[-1][1], "losses": {}}
    operations = {}
    for name, (prompt, make) in arms.items():
        counter = FlopCounterMode(display=False) if count else None
        with counter or nullcontext():
            cache = make()
            ids = torch.cat([prompt[:, int(cache.get_seq_length()) :], answer], 1)
            logits = read_into_cache(target, cache, ids, num_logits=answer.shape[1] + 1)
        row["losses"][name] = float(token_losses(logits[:, :-1], answer).sum())
        if counter is not None:
            operations[name] = counter.get_total_flops()
    return row | ({"operations": operations} if count else {})


def share(losses: np.ndarray, best: np.ndarray, worst: np.ndarray) -> dict[str, float | None]:
    """Of what `best` is better than `worst`, with a 95 % interval; losses are those on each question."""
    gained = np.stack([worst - best, worst - losses], 1)
    bounds = share_intervals(resampled_totals(gained)) if len(gained) >= MIN_DOCUMENTS else None
    low, high = (None, None) if bounds is None else bounds[:, 1].tolist()
    return {"value": float(gained[:, 1].sum() / gained[:, 0].sum()), "low": low, "high": high}


def summarise(rows: Sequence[dict]) -> dict[str, dict]:
    """For each method of one kind of question: loss, gap recovered, remaining gap recovered, operations saved."""
    losses = {name: np.array([row["losses"][name] for row in rows]) for name in rows[0]["losses"]}
    tokens = sum(row["tokens"] for row in rows)
    counted = [row["operations"] for row in rows if "operations" in row]
    operations = {name: sum(row[name] for row in counted) for name in losses}
    return {
        name: {
            "loss": float(own.sum() / tokens),
            # Of the gap between no context and a full prefill; and of what is left of it at new positions.
            "gap_recovered": share(own, losses[FULL], losses[FLOOR]),
            "remaining_recovered": share(own, losses[FULL], losses[NEW]),
            "operations_saved": 1 - operations[name] / operations[FULL],
        }
        for name, own in losses.items()
    }


def show(figures: dict[str, dict], rows: dict[str, list[dict]]) -> None:
    for kind, methods in figures.items():
        own = rows[kind]
        context = sum(row["context"] for row in own) / len(own)
        table = Table(title=f"{kind}: {len(own)} questions, contexts of {context:.0f} tokens")
        for column in ("", "loss", "gap recovered", "of the gap that is left", "operations saved"):
            table.add_column(column, justify="right" if column else "left")
        for name, method in methods.items():
            shares = (_interval(method[key]) for key in ("gap_recovered", "remaining_recovered"))
            table.add_row(name, f"{method['loss']:.3f}", *shares, f"{method['operations_saved']:.2f}")
        Console(width=110).print(table)


def _interval(share: dict[str, float | None]) -> str:
    bounds = "" if share["low"] is None else f" [{share['low']:.2f}, {share['high']:.2f}]"
    return f"{share['value']:.2f}{bounds}"


def draw(figures: dict[str, dict], efforts: Sequence[float], path: Path) -> None:
    """Gap recovered against the share of tokens that is read again."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "chunks"})
    figure = Figure(figsize=(2.6 * len(figures) + 0.2, 3.4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(figures), sharey=True, squeeze=False)[0], figures, strict=True):
        methods = figures[kind]
        curve = [(0.0, NEW), *((effort, effort_name(effort)) for effort in efforts), (1.0, FULL)]
        shares = [methods[name]["gap_recovered"] for _, name in curve]
        x, y = [100 * effort for effort, _ in curve], [part["value"] for part in shares]
        axes.plot(x, y, "o-", ms=3)
        known = [i for i, part in enumerate(shares) if part["low"] is not None]
        axes.fill_between(
            [x[i] for i in known], [shares[i]["low"] for i in known], [shares[i]["high"] for i in known], alpha=0.2
        )
        deviating = [methods[effort_name(effort, question=False)]["gap_recovered"]["value"] for effort in efforts]
        axes.plot(x, [y[0], *deviating, y[-1]], "--", lw=0.8, label="by deviation")
        if OLD in methods:
            axes.axhline(methods[OLD]["gap_recovered"]["value"], ls=":", lw=0.8, color="k", label=OLD)
        axes.legend(fontsize=7)
        axes.set(title=kind, xlabel="% of tokens read again")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("gap recovered")
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSON Lines with `text`; the last rows are used")
    parser.add_argument("output", type=Path, help="where .json and .svg are written, without the ending")
    parser.add_argument("--mapper", help="from SmolLM2 to Gemma 3: folder or Hub id")
    parser.add_argument("--origin", help="use only rows with this `source`")
    parser.add_argument("--questions", type=int, default=40, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--efforts", nargs="+", type=float, default=EFFORTS)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--length", type=int, default=400, help="characters of a chunk, facts apart")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    texts = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    texts = [row["text"] for row in texts if options.origin in (None, row.get("source"))]
    needed = (options.chunks + 1) * options.length
    texts = [text for text in texts if len(text) >= needed][-options.questions :]
    asked = {kind: KINDS[kind](texts, options.chunks, options.length) for kind in options.kinds}
    path = options.output.with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["kind"], row["number"]) for row in rows}
    left = [
        (kind, number)
        for number in range(len(texts))
        for kind in asked
        if number < len(asked[kind]) and (kind, number) not in done
    ]
    if left:
        target, target_tokenizer, methods = load(options.mapper, options.efforts)
    start = time.perf_counter()
    for kind, number in left:
        row = ask(asked[kind][number], target, target_tokenizer, methods, number < COUNTED)
        rows.append({"kind": kind, "number": number} | row)
        path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(f"{kind} {number}: {time.perf_counter() - start:.0f} s", flush=True)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    figures = {kind: summarise(own) for kind, own in by_kind.items() if own}
    path.write_text(json.dumps({"figures": figures, "rows": rows}, indent=1) + "\n")
    show(figures, by_kind)
    try:
        draw(figures, options.efforts, options.output.with_suffix(".svg"))
    except ImportError as error:
        print(f"The figures are written, but not drawn: {error}. `pip install matplotlib`.", file=sys.stderr)


if __name__ == "__main__":
    main()

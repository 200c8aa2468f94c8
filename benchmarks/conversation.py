"""
Dialogues that move between two models at every turn: what the translation costs each turn, and whether it adds up.

Both models read the dialogue's own replies, in turn. Once each is handed what the other has read, through the mappers;
once it reads everything itself. Given are the loss on the replies, turn by turn, the slope of the difference over the
turns with a 95 % interval from a bootstrap over dialogues, and the count of tokens: those that a model has not read
itself are those that were translated for it.

    python benchmarks/conversation.py DATA/dialogues.jsonl --back MAPPER
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hf_kvtransfer import Conversation, FidelityGate, KVMapper
from hf_kvtransfer.demo_models import load_demo_model


NAMES = "smollm2-135m-instruct", "gemma-3-270m"
MAPPER = Path(__file__).parents[1] / "mappers" / "--".join(NAMES)
RESAMPLES = 10_000


def turns(messages):
    """For each reply the messages before it and the reply; replies that follow each other are one."""
    before, found = [], []
    for message in messages:
        if message["role"] != "assistant":
            before.append(message)
        elif before:
            found.append((before, message["content"].strip()))
            before = []
        elif found:
            found[-1] = found[-1][0], f"{found[-1][1]}\n\n{message['content'].strip()}"
    return found


def replay(conversation, dialogue, first):
    """The report and the losses of each turn. The models take turns, `first` begins."""
    names = list(conversation.models)
    replies = []
    for turn, (messages, reply) in enumerate(dialogue):
        conversation.messages += [{"role": m["role"], "content": m["content"].strip()} for m in messages]
        replies.append(conversation.read_reply(names[(first + turn) % 2], None, reply))
    return replies


def rows_of(number, dialogue, first, models, mappers, options):
    """One row for each turn of a dialogue."""
    translated, native = (Conversation(models, given, **options) for given in (mappers, {}))
    arms = [replay(conversation, dialogue, first) for conversation in (translated, native)]
    rows = []
    for turn, (handed, own) in enumerate(zip(*arms, strict=True), start=1):
        report = handed.report
        rows.append(
            {
                "dialogue": number,
                "turn": turn,
                "model": report.model,
                "positions": len(own.losses),
                "native_loss": sum(own.losses),
                "translated_loss": sum(handed.losses),
                "kept": report.kept_tokens,
                "translated": sum(report.translated_tokens.values()),
                "read": report.native_tokens + report.reply_tokens,
                "reasons": list(report.reasons),
            }
        )
    for name in models:
        own = [row for row in rows if row["model"] == name]
        readers = translated.readers(name)
        held, foreign = len(readers), len(readers) - readers.count(name)
        # Tokens of its cache that were cut off again, where its template writes something else behind a reply.
        cut = sum(row["translated"] + row["read"] for row in own) - held
        print(
            f"  dialogue {number}, {name}: {held} tokens, {foreign} not read by itself, "
            f"{sum(row['translated'] for row in own)} translated; {cut} cut off again"
        )
    return rows


def slope(rows):
    """Of the difference in loss per token over the turns from the second on, weighted by positions."""
    rows = [row for row in rows if row["turn"] > 1]
    turn, weight = (np.array([row[key] for row in rows], dtype=float) for key in ("turn", "positions"))
    gap = np.array([row["translated_loss"] - row["native_loss"] for row in rows]) / weight
    centred = turn - np.average(turn, weights=weight)
    return float((weight * centred * gap).sum() / (weight * centred**2).sum())


def interval(rows):
    """95 % of the slope, over resampled dialogues."""
    by_dialogue = {}
    for row in rows:
        by_dialogue.setdefault(row["dialogue"], []).append(row)
    groups, draws = list(by_dialogue.values()), np.random.default_rng(0)
    drawn = (draws.integers(len(groups), size=len(groups)) for _ in range(RESAMPLES if len(groups) > 1 else 0))
    slopes = [slope([row for i in some for row in groups[i]]) for some in drawn]
    return [float(bound) for bound in np.quantile(slopes, (0.025, 0.975))] if slopes else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSON Lines with `messages`")
    parser.add_argument("--mapper", default=str(MAPPER), help=f"from {NAMES[0]} to {NAMES[1]}: folder or Hub id")
    parser.add_argument("--back", help="from the second to the first; without it the first reads everything itself")
    parser.add_argument("--dialogues", type=int, default=20, help="of those with enough turns")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--min-tokens", type=int, default=16, help="shorter runs are read")
    parser.add_argument("--probe", action="store_true", help="let each model probe what it is handed")
    parser.add_argument("--json", type=Path, help="write the rows and the figures here too")
    arguments = parser.parse_args()

    models = {name: load_demo_model(name) for name in NAMES}
    mappers = {NAMES: KVMapper.from_pretrained(arguments.mapper, dtype=models[NAMES[1]][0].dtype)}
    if arguments.back:
        mappers[NAMES[::-1]] = KVMapper.from_pretrained(arguments.back, dtype=models[NAMES[0]][0].dtype)
    # What is measured here is what the gate is to judge.
    options = {"gate": FidelityGate(strict=False), "min_tokens": arguments.min_tokens}
    options["probe_tokens"] = None if arguments.probe else 0
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    dialogues = [turns(json.loads(line)["messages"]) for line in lines]
    dialogues = [dialogue[: arguments.turns] for dialogue in dialogues if len(dialogue) >= arguments.turns]
    rows, start = [], time.perf_counter()
    for number, dialogue in enumerate(dialogues[: arguments.dialogues]):
        rows += rows_of(number, dialogue, number % 2, models, mappers, options)
        print(f"dialogue {number}: {time.perf_counter() - start:.0f} s", flush=True)

    table = Table(title="Loss on the replies, nats per token")
    for column in (
        "turn",
        "replies",
        "positions",
        "native",
        "translated",
        "difference",
        "translated tokens",
        "read",
        "kept",
    ):
        table.add_column(column, justify="right")
    for turn in range(1, arguments.turns + 1):
        own = [row for row in rows if row["turn"] == turn]
        total = {key: sum(row[key] for row in own) for key in own[0] if isinstance(own[0][key], int | float)}
        native, translated = (total[f"{arm}_loss"] / total["positions"] for arm in ("native", "translated"))
        counts = (str(total[key]) for key in ("translated", "read", "kept"))
        losses = (f"{native:.3f}", f"{translated:.3f}", f"{translated - native:+.3f}")
        table.add_row(str(turn), str(len(own)), str(total["positions"]), *losses, *counts)
    Console(width=110).print(table)
    figures = {"slope": slope(rows), "interval": interval(rows)}
    bounds = "" if figures["interval"] is None else " [{:+.4f}, {:+.4f}]".format(*figures["interval"])
    print(f"Slope of the difference from turn 2 on: {figures['slope']:+.4f}{bounds} nats per token and turn")
    reasons = sorted({reason for row in rows for reason in row["reasons"]})
    if reasons:
        print("\n  - ".join(["Not everything was translated:", *reasons]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

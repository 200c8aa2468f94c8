"""
One base model and two LoRAs of it: a context that the base has read is continued with either adapter.

    python benchmarks/lora.py DATA

On held-out text of the kind that an adapter was trained on, the base and the adapted model read the context
themselves; and the adapted model takes over the base's keys and values, as they are (exact up to the first layer that
the adapter reaches) or with a low-rank correction in the other layers, which `--texts 0` leaves out. And what serving
one context with both takes.

The first time the two are trained, some minutes each, and saved beside the demo models.
"""

import json

import torch
from pairs.made_models import SMOLLM2, train_lora
from pairs.measuring import (
    CONTINUATION,
    Pair,
    evaluate,
    held_out_rows,
    ids_of_context,
    make_parser,
    median_seconds,
    parse,
    print_table,
    share,
    timed,
    translation_steps,
)
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvtransfer import SourceKV, adapter_mapper
from hf_kvtransfer.compat import filled_cache
from hf_kvtransfer.demo_models import demo_model_path, load_demo_model


# What each is trained on, and where: the second is what a LoRA usually is.
ADAPTERS = {
    "late-mlps": ("gsm8k", {"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers": list(range(20, 30))}),
    "everywhere": ("huggingface/peft docs", {"target_modules": "all-linear"}),
}
RANK = 16
QUALITY = (
    "adapter",
    "mapper",
    "exact layers",
    "same bits",
    "context",
    "MB",
    "loss of the base",
    "adapted",
    "on the base's cache",
    "no context",
    "gap recovered",
    "as adapted",
    "made in, s",
)
COST = ("context", "prefills, s", "base's prefill, s", "handoffs, s", "shared, s", "ratio")


def load_models(rows: list[dict], steps: int) -> tuple[PreTrainedModel, PeftModel, PreTrainedTokenizerBase]:
    """The base, and apart from it the same with both adapters, which are trained if they are not there."""
    folders = {name: demo_model_path(SMOLLM2).with_name(f"{SMOLLM2}-lora-{name}-{steps}") for name in ADAPTERS}
    for name, (kind, where) in ADAPTERS.items():
        if not folders[name].is_dir():
            texts = [row["text"] for row in rows if row["source"] == kind]
            unfinished = folders[name].with_name(f".{folders[name].name}.partial")
            train_lora(*load_demo_model(SMOLLM2), texts, steps, **where).save_pretrained(unfinished)
            unfinished.rename(folders[name])
    (base, tokenizer), (model, _) = load_demo_model(SMOLLM2), load_demo_model(SMOLLM2)
    (first, folder), *others = folders.items()
    adapted = PeftModel.from_pretrained(model, folder, adapter_name=first)
    for name, folder in others:
        adapted.load_adapter(folder, name)
    return base, adapted.eval(), tokenizer


def loss_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict], context: int) -> float:
    """Nats per token of the continuations, read natively."""
    losses = []
    for row in rows:
        input_ids = torch.tensor([tokenizer(row["text"]).input_ids[: context + CONTINUATION]])
        losses.append(SourceKV.prefill(model, None, input_ids).token_losses[0, -CONTINUATION:])
    return torch.cat(losses).mean().item()


def same_layers(pair: Pair, row: dict, context: int) -> list[int]:
    """Layers of which the two models cache the same bits of a context, as measured."""
    input_ids = torch.tensor([pair.target_tokenizer(row["text"]).input_ids[:context]])
    sides = [SourceKV.prefill(model, None, input_ids).features for model in pair.models]
    return [i for i, states in enumerate(zip(*sides, strict=True)) if torch.equal(*states)]


def quality(pair: Pair, adapter: str, texts: list[str], held_out: list[dict], arguments) -> list[dict]:
    """For each length of context and mapper a dict of figures."""
    kind, _ = ADAPTERS[adapter]
    rows = [row for row in held_out if row["source"] == kind]
    mappers = {"as it is": timed(adapter_mapper, *pair.models)}
    if texts:
        mappers[f"corrected, rank {RANK}"] = timed(adapter_mapper, *pair.models, texts, rank=RANK, **pair.tokenizers)
    records = []
    for context in arguments.contexts:
        documents = held_out_rows(rows, pair.target_tokenizer, context)[: arguments.documents]
        about = {
            "adapter": adapter,
            "context": context,
            "same_layers": same_layers(pair, documents[0], context),
            "base_loss": loss_of(pair.source, pair.source_tokenizer, documents, context),
        }
        for name, (mapper, seconds) in mappers.items():
            figures = {
                "mapper": name,
                "exact_layers": mapper.config.fit["exact_layers"],
                "megabytes": mapper.num_bytes() / 1e6,
                "figures": evaluate(mapper, pair, documents, context).figures,
                "seconds": seconds,
            }
            records.append(about | figures)
    return records


def quality_row(record: dict) -> list[str]:
    """Cells under [`QUALITY`]."""
    exact, same, arms = record["exact_layers"], record["same_layers"], record["figures"]["arms"]
    return [
        record["adapter"],
        record["mapper"],
        f"0 to {exact[-1]}" if exact else "none",
        f"0 to {same[-1]}" if same == list(range(len(same))) and same else str(same or "none"),
        f"{record['context']:,}",
        f"{record['megabytes']:.2f}",
        f"{record['base_loss']:.3f}",
        *(f"{arms[arm]['loss']:.3f}" for arm in ("native", "translated", "no_context")),
        share(arms["translated"]["gap_recovered"]),
        f"{arms['translated']['agreement']:.3f}",
        f"{record['seconds']:.1f}",
    ]


def cost(pair: Pair, text: str, context: int, runs: int) -> dict:
    """Seconds of serving a context with each adapter: reading it again, or taking over what the base has read."""
    input_ids, _ = ids_of_context(pair, text, context)
    prefills, handoffs = [], []
    base = median_seconds({"prefill": lambda: filled_cache(pair.source, input_ids)}, runs)["prefill"]
    for adapter in ADAPTERS:
        pair.target.set_adapter(adapter)
        seconds = median_seconds(translation_steps(adapter_mapper(*pair.models), pair, text, context), runs)
        prefills.append(seconds["prefill"])
        handoffs.append(seconds["translate"])
    # Position-free keys are made once, whichever adapters follow.
    shared = base + seconds["unrotate"] + sum(handoffs)
    return {"context": context, "prefills": prefills, "base": base, "handoffs": handoffs, "shared": shared}


def cost_row(record: dict) -> list[str]:
    """Cells under [`COST`]."""
    prefills, handoffs = record["prefills"], record["handoffs"]
    return [
        f"{record['context']:,}",
        " + ".join(f"{seconds:.3f}" for seconds in prefills),
        f"{record['base']:.3f}",
        " + ".join(f"{seconds:.3f}" for seconds in handoffs),
        f"{record['shared']:.3f}",
        f"{sum(prefills) / record['shared']:.2f}",
    ]


def main():
    parser = make_parser(__doc__, texts=100, documents=40)
    parser.add_argument("--steps", type=int, default=120, help="of training each adapter")
    arguments, rows, held_out, texts = parse(parser)
    base, adapted, tokenizer = load_models(rows, arguments.steps)
    pair = Pair(base, tokenizer, adapted, tokenizer)
    records: dict[str, list[dict]] = {"quality": [], "cost": []}
    for adapter in ADAPTERS:
        adapted.set_adapter(adapter)
        records["quality"] += quality(pair, adapter, texts, held_out, arguments)
    text = "\n\n".join(row["text"] for row in held_out)
    records["cost"] = [cost(pair, text, context, arguments.runs) for context in arguments.contexts]
    if arguments.output:
        arguments.output.write_text(json.dumps(records, indent=2) + "\n")
    title = f"Continuing with an adapter what the base has read, {torch.get_num_threads()} threads"
    print_table(title, QUALITY, [quality_row(record) for record in records["quality"]])
    print_table("One context, both adapters", COST, [cost_row(record) for record in records["cost"]])


if __name__ == "__main__":
    main()

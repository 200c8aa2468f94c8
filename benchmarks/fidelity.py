"""
How much of the target's own cache a translated one replaces: loss and next-token agreement on held-out text.

Each piece of text gives a context and a continuation. The target scores the continuation after its own prefill of the
context, on a cache translated from the source, on one translated from another document, and after no context at all.

    python benchmarks/fidelity.py --data calibration.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvtransfer import KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.demo_models import load_demo_model
from hf_kvtransfer.spans import encode_with_spans


MAPPER = Path(__file__).parents[1] / "mappers" / "smollm2-135m-instruct--gemma-3-270m"


def pieces(texts, tokenizer, context, continuation):
    """Pairs of a context as text and the target's ids of context and continuation, for texts that are long enough."""
    for text in texts:
        ids, spans = encode_with_spans(tokenizer, text)
        if len(ids) >= context + continuation:
            yield text[: spans[context - 1][1]], torch.tensor([ids[: context + continuation]])


def score(target, cache, ids, continuation):
    """Log-probabilities of the last `continuation` tokens, given a cache of some tokens that stand before them."""
    new_ids = ids[:, cache.get_seq_length() :]
    output = target(new_ids, logits_to_keep=continuation + 1, **{cache_argument(target): cache})
    return output.logits[0, :-1].float().log_softmax(-1)


@torch.no_grad()
def measure(source, source_tokenizer, target, target_tokenizer, mapper, texts, context, continuation):
    """
    Returns:
        `dict`: For each arm the mean loss in nats per token, the share of positions at which the most probable token
        is the native one, and the share of the gap between no context and native that is recovered.
    """
    items = list(pieces(texts, target_tokenizer, context, continuation))
    losses, agreements = {}, {}
    source_kvs = []
    for text, _ in tqdm(items, desc="Source prefill"):
        source_kvs.append(SourceKV.prefill(source, source_tokenizer, text))
    for i, (_, ids) in enumerate(tqdm(items, desc="Scoring")):
        expected = ids[0, context:]
        sinks = mapper.config.sink_tokens

        def translated(number, ids=ids):
            context_ids = items[number][1][:, :context]
            cache = TranslatedCache(
                source_kvs[number], mapper, target, target_tokenizer=target_tokenizer, input_ids=context_ids
            )
            # Boundaries of the two tokenizers may differ at the very end: score from the same token in every arm.
            cache.crop(context - 1 - cache.get_seq_length())
            return cache

        arms = {
            "native": (DynamicCache(config=target.config), ids),
            "translated": (translated(i), ids),
            "another document": (translated((i + 1) % len(items)), ids),
            "no context": (
                DynamicCache(config=target.config),
                torch.cat([ids[:, :sinks], ids[:, context - 1 :]], 1),
            ),
        }
        native_choice = None
        for arm, (cache, arm_ids) in arms.items():
            log_probs = score(target, cache, arm_ids, continuation)
            choice = log_probs.argmax(-1)
            native_choice = choice if native_choice is None else native_choice
            losses.setdefault(arm, []).append(-log_probs.gather(-1, expected[:, None]).mean().item())
            agreements.setdefault(arm, []).append((choice == native_choice).double().mean().item())
    mean = {arm: sum(values) / len(values) for arm, values in losses.items()}
    return {
        "pieces": len(items),
        "positions": len(items) * continuation,
        "arms": {
            arm: {
                "loss": mean[arm],
                "agreement": sum(agreements[arm]) / len(items),
                "gap_recovered": (mean["no context"] - mean[arm]) / (mean["no context"] - mean["native"]),
            }
            for arm in arms
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with a `text` field in each row")
    parser.add_argument("--last", type=float, default=0.1, help="share of rows at the end of the file that are used")
    parser.add_argument("--pieces", type=int, help="at most this many rows")
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--continuation", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    rows = [json.loads(line)["text"] for line in arguments.data.open(encoding="utf-8")]
    rows = rows[-max(1, round(len(rows) * arguments.last)) :][: arguments.pieces]
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    result = measure(
        source, source_tokenizer, target, target_tokenizer, mapper, rows, arguments.context, arguments.continuation
    )
    print(f"\n{result['pieces']} pieces, context {arguments.context}, {result['positions']} positions scored")
    print(f"{'':18}{'loss':>8}{'agreement':>11}{'gap recovered':>15}")
    for arm, figures in result["arms"].items():
        print(f"{arm:18}{figures['loss']:8.3f}{figures['agreement']:11.3f}{figures['gap_recovered']:15.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

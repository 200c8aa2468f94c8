"""
How well a policy predicts the times of prefills and handoffs, and what its choices lose against hindsight.

The policy is calibrated on its own lengths. Then both are timed at others, interleaved, and the predicted time of a
handoff as a share of a prefill is held against the measured one. A choice loses what the way not taken would have
saved, as a share of the better one.

    python benchmarks/policy.py
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from hf_kvtransfer import KVMapper, TransferPolicy
from hf_kvtransfer.demo_models import load_demo_model
from hf_kvtransfer.policy import measuring


MAPPER = Path(__file__).parents[1] / "mappers" / "smollm2-135m-instruct--gemma-3-270m"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 192, 256, 384, 512, 768, 1024, 2048, 4096])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    tokenizers = {"source_tokenizer": source_tokenizer, "target_tokenizer": target_tokenizer}
    policy = TransferPolicy.calibrate(mapper, source, target, fresh=True, **tokenizers)
    found = measuring.time_lengths(
        mapper, source, target, lengths=arguments.lengths, runs=arguments.runs, **tokenizers
    )

    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {arguments.runs} runs; ratio: handoff / prefill")
    print(f"{'tokens':>7}{'prefill':>10}{'handoff':>10}{'ratio':>8}{'predicted':>11}{'off by':>8}  choice     loses")
    rows = []
    for row in found:
        tokens, prefill, handoff = row["tokens"], row["prefill"], row["handoff"]
        # What a policy adds for probes that refuse is no time of a handoff.
        ratio = policy.costs.handoff.seconds(tokens) / policy.costs.prefill.seconds(tokens)
        error = ratio / (handoff / prefill) - 1
        choice = policy.decide(tokens).choice
        loss = (handoff if choice == "transfer" else prefill) / min(handoff, prefill) - 1
        rows.append(row | {"predicted_ratio": ratio, "error": error, "choice": choice, "loss": loss})
        print(
            f"{tokens:7,}{prefill:9.3f}s{handoff:9.3f}s{handoff / prefill:8.3f}{ratio:11.3f}{error:8.0%}  {choice:9}"
            f"{loss:7.1%}"
        )
    losses = [row["loss"] for row in rows]
    print(f"off by {max(abs(row['error']) for row in rows):.0%} at most")
    print(f"choices lose {statistics.fmean(losses):.1%} on average, {max(losses):.1%} at most")
    print(policy.decide(1024))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

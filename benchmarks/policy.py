"""
How well a policy predicts the times of prefills and handoffs, and what its choices lose against hindsight.

The policy is calibrated on its own lengths. Then both are timed at others, interleaved, and the predicted time of a
handoff as a share of a prefill is held against the measured one. A choice loses what the way not taken would have
saved, as a share of the better one.

    python -m benchmarks.policy
"""

import statistics

import torch

from hf_kvtransfer import TransferPolicy
from hf_kvtransfer.policy import measuring

from .demo_pair import DemoPair, demo_parser, write_json


def main(arguments: list[str] | None = None) -> None:
    parser = demo_parser(__doc__, [128, 192, 256, 384, 512, 768, 1024, 2048, 4096])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    pair = DemoPair(options.mapper, max(options.lengths))
    models = pair.mapper, pair.source, pair.target
    policy = TransferPolicy.calibrate(*models, fresh=True, **pair.tokenizers)
    found = measuring.time_lengths(*models, lengths=options.lengths, runs=options.runs, **pair.tokenizers)

    print(f"\nfloat32, {torch.get_num_threads()} threads, medians of {options.runs} runs; ratio: handoff / prefill")
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
    write_json(options.json, rows)


if __name__ == "__main__":
    main()

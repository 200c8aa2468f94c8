"""
The shipped mapper on HellaSwag alone, 3-shot, on all its questions and without most of the evaluation's controls.

    python mappers/hellaswag.py DATA

DATA is a folder with hellaswag.jsonl, whose first rows are the examples.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from evidence import FOLDER, SHOTS, SOURCE, TARGET, few_shot, read
from tqdm import tqdm

from hf_kvtransfer import KVMapper
from hf_kvtransfer.demo_models import load_demo_model
from hf_kvtransfer.fidelity.arms import arm_name, effort_arm, in_order
from hf_kvtransfer.fidelity.data import load_evaluation_data
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.statistics import resampled_totals


ARMS = ("native", "translated", "no_context")


def report(chosen: dict[str, list[int]], labels: list[int]):
    """Print the accuracy of each arm, and how its choices compare with the native ones."""
    print(f"HellaSwag, {SHOTS}-shot, {len(labels)} questions, 4 endings each:")
    native = np.array(chosen["native"])
    for arm, endings in chosen.items():
        pairs = np.stack([endings, native], 1)
        correct = pairs == np.array(labels)[:, None]
        accuracy, native_accuracy = correct.mean(0)
        own, others = resampled_totals(correct).T
        low, high = np.quantile(own / others, [0.025, 0.975])
        print(
            f"  {arm_name(arm)}: accuracy {accuracy:.3f}, of the native one {accuracy / native_accuracy:.3f} "
            f"[95 % {low:.3f}, {high:.3f}]; the same ending {(pairs[:, 0] == native).mean():.3f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with hellaswag.jsonl")
    parser.add_argument("--mapper", type=Path, default=FOLDER)
    parser.add_argument("--tail-tokens", type=int, default=1, help="last ones of a question that Gemma reads itself")
    parser.add_argument("--effort", type=float, action="append", default=[], help="measured, too; may be repeated")
    parser.add_argument("--limit", type=int, help="at most so many questions, spread over all")
    arguments = parser.parse_args()

    source, source_tokenizer = load_demo_model(SOURCE)
    target, target_tokenizer = load_demo_model(TARGET)
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    replay = Replay(mapper, source, target, source_tokenizer, target_tokenizer, tail_tokens=arguments.tail_tokens)
    rows = few_shot(read(arguments.data / "hellaswag.jsonl"))
    documents = load_evaluation_data(rows, source_tokenizer, target_tokenizer, limit=arguments.limit).documents
    arms = in_order({*ARMS, *map(effort_arm, arguments.effort)})
    chosen, labels = {arm: [] for arm in arms}, []
    for document in tqdm(documents, desc="HellaSwag", unit="question"):
        (passage,) = document.passages
        scores = replay.score(passage, arms=arms)
        for arm, endings in chosen.items():
            endings.append(scores[arm].chosen)
        labels.append(passage.label)
    report(chosen, labels)


if __name__ == "__main__":
    main()

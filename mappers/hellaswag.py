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
from hf_kvtransfer.fidelity.data import load_evaluation_data
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.statistics import resampled_totals


ARMS = ("native", "translated", "no_context")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with hellaswag.jsonl")
    parser.add_argument("--mapper", type=Path, default=FOLDER)
    parser.add_argument("--tail-tokens", type=int, default=1, help="last ones of a question that Gemma reads itself")
    parser.add_argument("--limit", type=int, help="at most so many questions, spread over all")
    arguments = parser.parse_args()

    source, source_tokenizer = load_demo_model(SOURCE)
    target, target_tokenizer = load_demo_model(TARGET)
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    replay = Replay(mapper, source, target, source_tokenizer, target_tokenizer, tail_tokens=arguments.tail_tokens)
    rows = few_shot(read(arguments.data / "hellaswag.jsonl"))
    documents = load_evaluation_data(rows, source_tokenizer, target_tokenizer, limit=arguments.limit).documents
    chosen, labels = [], []
    for document in tqdm(documents, desc="HellaSwag", unit="question"):
        (passage,) = document.passages
        scores = replay.score(passage, arms=ARMS)
        chosen.append([scores[arm].chosen for arm in ARMS])
        labels.append(passage.label)

    chosen = np.array(chosen)
    correct = chosen == np.array(labels)[:, None]
    native, translated = resampled_totals(correct[:, :2]).T
    low, high = np.quantile(translated / native, [0.025, 0.975])
    print(f"HellaSwag, {SHOTS}-shot, {len(correct)} questions, 4 endings each; accuracy:")
    for arm, accuracy in zip(ARMS, correct.mean(0), strict=True):
        print(f"  {arm.replace('_', ' ')}: {accuracy:.3f}")
    print(f"Translated / native: {correct[:, 1].mean() / correct[:, 0].mean():.3f} [95 % {low:.3f}, {high:.3f}]")
    print(f"The same ending chosen as natively: {(chosen[:, 0] == chosen[:, 1]).mean():.3f}")


if __name__ == "__main__":
    main()

"""
The evidence of the shipped mapper: measures it on held-out text, dialogues and multiple choice, and writes
`fidelity.json` beside its weights. Goes on where it was interrupted.

    python mappers/evidence.py DATA

DATA is a folder with calibration.jsonl (its last tenth is held out), dialogues.jsonl, hellaswag.jsonl and gsm8k.jsonl.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from hf_kvtransfer import FidelityGate, KVMapper, evaluate_mapper
from hf_kvtransfer.commands.output import print_report
from hf_kvtransfer.demo_models import DEMO_MODELS, load_demo_model


SOURCE, TARGET = "smollm2-135m-instruct", "gemma-3-270m"
FOLDER = Path(__file__).parent / f"{SOURCE}--{TARGET}"
# What the kinds of held-out text ask of a model.
CAPABILITIES = {
    "hellaswag": "everyday text",
    "gsm8k": "reasoning",
    "wikitext": "knowledge",
    "docs": "code and documentation",
}
SHOTS = 3


def read(path):
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def spread(rows, count):
    """At most `count` rows, at even distances."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def few_shot(rows):
    """HellaSwag as it is usually given, behind a few solved examples, so that there is a context to translate."""
    shots = "".join(f"{row['context']} {row['endings'][row['label']]}\n\n" for row in rows[:SHOTS])
    return [row | {"context": shots + row["context"]} for row in rows[SHOTS:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the four files")
    parser.add_argument("--texts", type=int, default=20, help="held-out pieces of each kind of text")
    parser.add_argument("--dialogues", type=int, default=10)
    parser.add_argument("--choices", type=int, default=30, help="questions of each kind")
    parser.add_argument("--effort", type=float, action="append", default=[], help="measured, too; may be repeated")
    parser.add_argument("--mapper", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    held_out = read(arguments.data / "calibration.jsonl")
    held_out = held_out[len(held_out) - round(len(held_out) * 0.1) :]
    data = {
        capability: spread([row for row in held_out if kind in row["source"]], arguments.texts)
        for kind, capability in CAPABILITIES.items()
    }
    data["dialogue"] = spread(read(arguments.data / "dialogues.jsonl"), arguments.dialogues)
    data["HellaSwag, 3-shot"] = spread(few_shot(read(arguments.data / "hellaswag.jsonl")), arguments.choices)
    data["GSM8K, whose answer"] = spread(read(arguments.data / "gsm8k.jsonl"), arguments.choices)

    source, source_tokenizer = load_demo_model(SOURCE)
    target, target_tokenizer = load_demo_model(TARGET)
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=torch.float32)
    work_file = arguments.mapper / "fidelity.partial.jsonl"
    start = time.perf_counter()
    report = evaluate_mapper(
        mapper,
        source,
        target,
        data,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        corrupted_documents=40,
        efforts=arguments.effort,
        work_file=work_file,
    )
    report.mapper["name"] = arguments.mapper.name
    for side, name in ((report.source, SOURCE), (report.target, TARGET)):
        side["identity"]["name"] = DEMO_MODELS[name].url.removeprefix("https://huggingface.co/")
    report.save(arguments.mapper)
    work_file.unlink()
    print_report(report)
    print(f"{time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads")
    print("\n  - ".join(["The default gate:", *(FidelityGate().judge(report) or ["admitted"])]))


if __name__ == "__main__":
    main()

"""
The recipe of the mappers from SmolLM2 to Gemma 3: a closed-form fit within a budget, then distillation.

    python mappers/smollm2-135m-instruct--gemma-3-270m.py calibration.jsonl

Goes on where it was interrupted. mappers/README.md has the command of the small one. The way back, which is not
shipped, is the closed form alone:

    python mappers/smollm2-135m-instruct--gemma-3-270m.py calibration.jsonl --source gemma-3-270m \\
        --target smollm2-135m-instruct --fit-texts 110 --distill-texts 0 --plain --output FOLDER
"""

import argparse
import hashlib
import json
import resource
import shutil
import time
from pathlib import Path

import torch
from evidence import FOLDER, SOURCE, TARGET, spread

from hf_kvtransfer import KVMapper, distill_mapper, fit_mapper
from hf_kvtransfer.demo_models import DEMO_MODELS, load_demo_model
from hf_kvtransfer.layer_table import explained_variance


# What keys and values of Gemma's layers with full attention are worth in the choice of what is read. A translation's
# loss is mostly that of these keys, as benchmarks/what_limits.py measures it.
IMPORTANCE = {5: (4.0, 1.0), 11: (8.0, 1.0), 17: (4.0, 1.0)}
SCREENING_TOKENS = 32768


def read(path):
    """Texts, without the last tenth of the rows: two rows of one origin that follow each other make one text."""
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    rows = rows[: len(rows) - round(len(rows) * 0.1)]
    pieces = {}
    for row in rows:
        pieces.setdefault(row["source"], []).append(row["text"])
    return ["\n\n".join(texts[i : i + 2]) for texts in pieces.values() for i in range(0, len(texts) - 1, 2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSONL of rows with `source` and `text`, the last tenth held out")
    parser.add_argument("--source", default=SOURCE, choices=DEMO_MODELS)
    parser.add_argument("--target", default=TARGET, choices=DEMO_MODELS)
    parser.add_argument("--budget", default="45MB")
    parser.add_argument("--kind", default="linear")
    parser.add_argument("--rank", type=int, help="of kind low_rank")
    parser.add_argument("--storage-bits", type=int, default=8)
    parser.add_argument("--native-layers", type=int, default=0)
    parser.add_argument("--fit-texts", type=int, default=400)
    parser.add_argument("--distill-texts", type=int, default=208, help="other texts than those of the fit; 0 for none")
    parser.add_argument(
        "--plain", action="store_true", help="source layers alone, chosen as if all target layers were worth the same"
    )
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    texts = read(arguments.data)
    fit_texts = spread(texts, arguments.fit_texts)
    known = set(fit_texts)
    distill_texts = spread([text for text in texts if text not in known], arguments.distill_texts)
    source, source_tokenizer = load_demo_model(arguments.source)
    target, target_tokenizer = load_demo_model(arguments.target)
    tokenizers = {"source_tokenizer": source_tokenizer, "target_tokenizer": target_tokenizer}
    choice = {"previous_tokens": 0} if arguments.plain else {"screening_tokens": SCREENING_TOKENS}
    if arguments.target == TARGET and not arguments.plain:
        choice["importance"] = IMPORTANCE
    work = arguments.output / "work"
    fitted = work / "fitted"
    if not fitted.exists():
        start = time.perf_counter()
        mapper = fit_mapper(
            source,
            target,
            fit_texts,
            **tokenizers,
            kind=arguments.kind,
            rank=arguments.rank,
            native_layers=arguments.native_layers,
            budget=arguments.budget,
            **choice,
            storage_bits=arguments.storage_bits,
            max_tokens=None,
            checkpoint=work,
        )
        mapper.save_pretrained(fitted)
        print(f"Closed form: {time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads")
    mapper = KVMapper.from_pretrained(fitted)
    if distill_texts:
        start = time.perf_counter()
        mapper = distill_mapper(mapper, source, target, distill_texts, **tokenizers, checkpoint=work)
        print(f"Distillation: {time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads")
    for side, name in ((mapper.config.source, arguments.source), (mapper.config.target, arguments.target)):
        side["name"] = DEMO_MODELS[name].url.removeprefix("https://huggingface.co/")
    mapper.config.fit["data_sha256"] = hashlib.sha256(arguments.data.read_bytes()).hexdigest()
    mapper.save_pretrained(arguments.output)
    shutil.rmtree(work)

    explained = explained_variance(mapper)
    print(f"{mapper.num_bytes() / 1e6:.1f} MB, peak memory {peak_gib():.1f} GiB")
    print(
        "Held-out variance that the closed form explains, mean over layers: "
        f"keys {explained['keys']:.3f}, values {explained['values']:.3f}"
    )
    if distill_texts:
        history = mapper.config.fit["distillation"]["held_out_divergence"]
        best = min(score for _, score in history)
        print(f"Held-out divergence: {history[0][1]:.4f} before distillation, {best:.4f} after")


def peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()

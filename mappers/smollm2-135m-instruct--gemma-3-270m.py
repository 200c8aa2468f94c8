"""
The recipe of the mapper in the folder of the same name.

    python mappers/smollm2-135m-instruct--gemma-3-270m.py calibration.jsonl
"""

import argparse
import hashlib
import json
import resource
import time
from pathlib import Path

import torch

from hf_kvtransfer import fit_mapper
from hf_kvtransfer.demo_models import DEMO_MODELS, load_demo_model
from hf_kvtransfer.padding import pad_rows


SOURCE, TARGET = "smollm2-135m-instruct", "gemma-3-270m"
FOLDER = Path(__file__).with_suffix("")


def forward_seconds(texts, *models):
    """Seconds that the models take to read the texts, eight of similar length at once, as the fit does."""
    start = time.perf_counter()
    for model, tokenizer in models:
        rows = sorted((tokenizer(text).input_ids for text in texts), key=len)
        for i in range(0, len(rows), 8):
            input_ids, mask = pad_rows(rows[i : i + 8])
            with torch.no_grad():
                model(input_ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSONL with a `text` field in each row; the last tenth is left out")
    parser.add_argument("--texts", type=int, default=200, help="rows to fit on, spread evenly over the file")
    parser.add_argument("--num-source-layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    content = arguments.data.read_bytes()
    rows = [json.loads(line)["text"] for line in content.splitlines()]
    rows = rows[: len(rows) - round(len(rows) * 0.1)]
    step = len(rows) / min(arguments.texts, len(rows))
    texts = [rows[int(i * step)] for i in range(min(arguments.texts, len(rows)))]

    source, source_tokenizer = load_demo_model(SOURCE)
    target, target_tokenizer = load_demo_model(TARGET)
    start = time.perf_counter()
    mapper = fit_mapper(
        source,
        target,
        texts,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        native_layers=None,
        num_source_layers=arguments.num_source_layers,
        max_tokens=None,
        screening_tokens=32768,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    forward = forward_seconds(texts[::4], (source, source_tokenizer), (target, target_tokenizer)) * 4
    for side, name in ((mapper.config.source, SOURCE), (mapper.config.target, TARGET)):
        side["name"] = DEMO_MODELS[name].url.removeprefix("https://huggingface.co/")
    mapper.config.fit["data_sha256"] = hashlib.sha256(content).hexdigest()
    mapper.save_pretrained(arguments.output)
    explained = torch.tensor([layer["explained_variance"] for layer in mapper.config.fit["layers"]]).mean(0).tolist()
    print(f"Explained variance, mean over layers: keys {explained[0]:.3f}, values {explained[1]:.3f}")
    print(f"{len(texts)} texts in {seconds:.0f} s on {torch.get_num_threads()} threads, peak memory {peak:.1f} GiB")
    print(f"{seconds / forward:.2f} times the two models' plain forward passes (timed on every fourth text)")


if __name__ == "__main__":
    main()

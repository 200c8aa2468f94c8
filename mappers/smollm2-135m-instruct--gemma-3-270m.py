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
from hf_kvtransfer.demo_models import load_demo_model


FOLDER = Path(__file__).with_suffix("")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="JSONL with a `text` field in each row; the last tenth is left out")
    parser.add_argument("--texts", type=int, default=270, help="rows to fit on, spread evenly over the file")
    parser.add_argument("--num-source-layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    content = arguments.data.read_bytes()
    rows = [json.loads(line)["text"] for line in content.splitlines()]
    rows = rows[: len(rows) - round(len(rows) * 0.1)]
    step = len(rows) / min(arguments.texts, len(rows))
    texts = [rows[int(i * step)] for i in range(min(arguments.texts, len(rows)))]

    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    start = time.perf_counter()
    mapper = fit_mapper(
        source,
        target,
        texts,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        num_source_layers=arguments.num_source_layers,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    mapper.config.fit["data_sha256"] = hashlib.sha256(content).hexdigest()
    mapper.save_pretrained(arguments.output)
    explained = torch.tensor([layer["explained_variance"] for layer in mapper.config.fit["layers"]]).mean(0).tolist()
    print(f"Explained variance, mean over layers: keys {explained[0]:.3f}, values {explained[1]:.3f}")
    print(f"{len(texts)} texts in {seconds:.0f} s on {torch.get_num_threads()} threads, peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()

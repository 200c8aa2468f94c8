"""The two demo models, a mapper between them and text: what measurements of times and memory have in common."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_kvtransfer import KVMapper, SourceKV
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.demo_models import load_demo_model


ROOT = Path(__file__).parents[1]
MAPPER = ROOT / "mappers" / "smollm2-135m-instruct--gemma-3-270m"
TEXT_FILES = ("examples/harbour.txt", "LICENSE", "mappers/README.md", "README.md")


class DemoPair:
    """
    Args:
        mapper (`str`):
            Folder or Hub id.
        longest (`int`):
            Tokens of the target in the longest context that is going to be read.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Of the models and the mapper.
    """

    def __init__(self, mapper: str, longest: int, dtype: torch.dtype = torch.float32):
        self.source, self.source_tokenizer = load_demo_model("smollm2-135m-instruct", dtype)
        self.target, self.tokenizer = load_demo_model("gemma-3-270m", dtype)
        self.mapper = KVMapper.from_pretrained(mapper, dtype=dtype)
        self.text = long_text(longest)
        _, self.spans = encode_with_spans(self.tokenizer, self.text)

    @property
    def tokenizers(self) -> dict[str, Any]:
        return {"source_tokenizer": self.source_tokenizer, "target_tokenizer": self.tokenizer}

    def read(self, length: int) -> tuple[SourceKV, torch.Tensor]:
        """A context of so many tokens of the target: what the source has read, and the target's ids."""
        context = self.text[: self.spans[length - 1][1]]
        input_ids = torch.tensor([encode_with_spans(self.tokenizer, context)[0]])
        return SourceKV.prefill(self.source, self.source_tokenizer, context), input_ids


def long_text(tokens: int) -> str:
    """Text of the repository, of so many tokens and more: not one over and over, which a model could copy."""
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXT_FILES)
    return text * (1 + 2 * tokens // len(text.split()))


def demo_parser(description: str, lengths: list[int]) -> argparse.ArgumentParser:
    """Options that all of these scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="target tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser


def write_json(path: Path | None, results: Any) -> None:
    """Write the figures, if they are wanted."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")

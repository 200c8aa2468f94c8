"""`evaluate_mapper`: held-out data in, evidence out."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import __version__
from ..cache_policy import cache_policy
from ..compat import model_name, public_name
from ..effort import check_efforts
from ..errors import EvaluationDataError
from ..identity import ModelIdentity
from ..mapper import KVMapper
from ..translation import check_not_negative
from .corruptions import CORRUPTIONS
from .data import Document, load_evaluation_data
from .document_replay import DocumentReplay
from .probe_band import ProbeBand
from .replay import Replay
from .report import FidelityReport
from .results import PassageResult
from .tail_reading import TailReading
from .work_file import WorkFile


logger = logging.get_logger(__name__)

# Packages that the figures depend on.
_PACKAGES = ("transformers", "torch", "tokenizers")
_WHY = f"More about it, which may quote the data, goes to the logger {DocumentReplay.__module__} at level DEBUG."


def evaluate_mapper(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    data: str | Path | Iterable | dict,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    context_tokens: int = 256,
    continuation_tokens: int = 64,
    max_length: int = 2048,
    limit: int | None = None,
    sink_tokens: int | None = None,
    tail_tokens: int = 1,
    efforts: Sequence[float] = (),
    false_alarm_rate: float = 0.05,
    probe_documents: int = 150,
    corrupted_documents: int = 60,
    work_file: str | Path | None = None,
    seed: int = 0,
) -> FidelityReport:
    """
    Measure how well the target continues on what a mapper translates, against its own prefill and against controls.

    Each document gives one or more contexts, and what follows them. The target scores what follows on its own prefill
    and on caches of other origins (see [`Replay`]). Turns of a dialogue are replayed as they would be served: at each
    the source has read the turns before, and the reply is scored.

    The loss on the end of contexts, read on top of right and of corrupted translations, calibrates the probe.

    Args:
        mapper ([`KVMapper`]):
            Fitted for the pair.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models, in eval mode. They are not changed.
        data:
            Text, dialogues or multiple-choice questions that the mapper was not fitted on, see
            [`load_evaluation_data`].
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers. One is enough if they share it, none for token ids of one vocabulary.
        context_tokens (`int`, *optional*, defaults to 256), continuation_tokens (`int`, *optional*, defaults to 64):
            Target tokens of a text that are context, and that are scored behind it.
        max_length (`int`, *optional*, defaults to 2048):
            Longer contexts, in target tokens, are left out; of a dialogue the turns that have one.
        limit (`int`, *optional*):
            Documents of each source of data that are used, all by default.
        sink_tokens (`int`, *optional*):
            First tokens that the target reads itself, by default as in the mapper's fit.
        tail_tokens (`int`, *optional*, defaults to 1):
            Last tokens of each context that it reads itself, on top of the others, in all arms. What is measured with
            more than one holds for uses with as many: the gate asks for them.
        efforts (`Sequence[float]`, *optional*, defaults to `()`):
            Shares of the translated tokens, above 0 and up to 1: the translated cache is also scored with each of them
            as `effort` of a [`TranslatedCache`] that is given the context. A gate then knows what an effort is worth,
            and `effort="auto"` chooses among them.
        false_alarm_rate (`float`, *optional*, defaults to 0.05):
            Share of right translations that the probe may refuse, at most 0.5.
        probe_documents (`int`, *optional*, defaults to 150):
            Documents with a long enough context that the probe is calibrated on. 0 leaves it out.
        corrupted_documents (`int`, *optional*, defaults to 60):
            How many of them are also read with planted corruptions, for the probe's operating curve.
        work_file (`str` or `Path`, *optional*):
            Each finished document is written there. A later call with the same arguments goes on behind the last one.
        seed (`int`, *optional*, defaults to 0):
            Of the random map and of the corruptions.

    Returns:
        [`FidelityReport`]: Save it in the mapper's folder, where it is the evidence that a gate looks at.

    Raises:
        `PairMismatchError`, `TokenizerMismatchError`: the mapper is not for these models and tokenizers.
        `EvaluationDataError`: the data cannot be used, or `work_file` is of another evaluation.
        `UnsupportedModelError`: there are `efforts`, and the target cannot read single tokens again.
        `ValueError`: a number is out of range, an effort is there twice, or a model is in training mode.

    Example:

    ```python
    >>> report = evaluate_mapper(mapper, source, target, "held_out.jsonl", source_tokenizer=a, target_tokenizer=b)
    >>> report.figures["arms"]["translated"]["gap_recovered"]["value"]
    0.78
    >>> report.save("my-mapper")
    ```
    """
    if not 0 < false_alarm_rate <= 0.5:
        raise ValueError(f"`false_alarm_rate` must be above 0 and at most 0.5, got {false_alarm_rate}.")
    check_efforts(efforts)
    check_not_negative(
        sink_tokens=sink_tokens, probe_documents=probe_documents, corrupted_documents=corrupted_documents
    )
    replay = Replay(
        mapper,
        source,
        target,
        source_tokenizer,
        target_tokenizer,
        sink_tokens=sink_tokens,
        tail_tokens=tail_tokens,
        seed=seed,
    )
    opened = load_evaluation_data(
        data,
        replay.source_tokenizer,
        replay.target_tokenizer,
        context_tokens=context_tokens,
        continuation_tokens=continuation_tokens,
        max_length=max_length,
        limit=limit,
    )
    documents = opened.documents
    if len(documents) < 2:
        raise EvaluationDataError(
            f"`data` gives {len(documents)} document(s). At least 2 are needed: a cache of another one is the control "
            "that tells whether a translation says anything about its own."
        )
    _check_vocabulary(documents, source, target)
    about: dict[str, Any] = {
        side: {"identity": ModelIdentity.from_model(model, tokenizer).to_dict(), "cache_policy": cache_policy(model)}
        for side, model, tokenizer in (
            ("source", source, replay.source_tokenizer),
            ("target", target, replay.target_tokenizer),
        )
    }
    about["data"] = opened.sources
    about["settings"] = {
        "context_tokens": context_tokens,
        "continuation_tokens": continuation_tokens,
        "max_length": max_length,
        "limit": limit,
        "sink_tokens": replay.sink_tokens,
        "tail_tokens": tail_tokens,
        "false_alarm_rate": false_alarm_rate,
        "probe_documents": probe_documents,
        "corrupted_documents": corrupted_documents,
        "seed": seed,
        "source_dtype": str(source.dtype).removeprefix("torch."),
        "target_dtype": str(target.dtype).removeprefix("torch."),
    }
    if efforts:
        about["settings"]["efforts"] = sorted(map(float, efforts))
    about["versions"] = _versions()
    # Ids depend on chat templates, too, which are no part of a tokenizer's identity.
    digest = hashlib.sha256(json.dumps([dataclasses.asdict(document) for document in documents]).encode())
    header = about | {"mapper": mapper.digest(), "documents": digest.hexdigest()}

    work = WorkFile(None if work_file is None else Path(work_file), header)
    evaluation = DocumentReplay(replay, documents, probe_documents, corrupted_documents, seed, efforts)
    done = len(work.records)
    numbers = range(done, len(documents))
    for number in logging.tqdm(numbers, desc="Evaluating", unit="document", initial=done, total=len(documents)):
        try:
            work.append(evaluation.record(number))
        except Exception as error:
            error.add_note(f"While evaluating document {documents[number].key!r}.")
            raise
    if all(record["skipped"] for record in work.records):
        raise EvaluationDataError(
            f"None of the {len(documents)} documents can be evaluated, the first because of "
            f"{work.records[0]['skipped']}. {_WHY}"
        )
    return FidelityReport(
        mapper={
            "name": public_name(mapper) if mapper.config._name_or_path else mapper.name,
            "digest": mapper.digest(),
            "native_layers": mapper.config.native_layers,
        },
        **about | {"data": _with_skipped(opened.sources, work.records)},
        results=[PassageResult.from_dict(row) for record in work.records for row in record["results"]],
        probe=_calibrate(work.records, false_alarm_rate),
    )


def _check_vocabulary(documents: Sequence[Document], source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Refuse ids that a model has no embedding for: of its own error a GPU does not recover."""
    for side, model in (("source", source), ("target", target)):
        size = model.get_input_embeddings().weight.shape[0]
        for document in documents:
            for passage in document.passages:
                read = passage.source_ids or []
                if side == "target":
                    read = [*passage.target_ids, *(number for ids in passage.continuations for number in ids)]
                if max(read, default=0) >= size:
                    raise EvaluationDataError(
                        f"Document {document.key!r} has the token id {max(read)}, but the {side} "
                        f"({model_name(model)}) has {size} embeddings, for ids from 0 to {size - 1}. Give token ids, "
                        "or text and a tokenizer, of its own vocabulary."
                    )


def _versions() -> dict[str, str]:
    packages = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"hf_kvtransfer": __version__, **packages, "python": platform.python_version()}


def _calibrate(records: Sequence[dict[str, Any]], false_alarm_rate: float) -> dict[str, Any] | None:
    right = [TailReading(**record["right"]) for record in records if record["right"]]
    wrong: dict[str, Sequence[TailReading]] = {
        name: [TailReading(**record["wrong"][name]) for record in records if name in record["wrong"]]
        for name in CORRUPTIONS
    }
    band = ProbeBand.calibrate(right, wrong, false_alarm_rate)
    return None if band is None else band.to_dict()


def _with_skipped(sources: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources of the data, with documents that could not be aligned among what was left out."""
    skipped = [record for record in records if record["skipped"]]
    if skipped:
        logger.warning(
            f"{len(skipped)} of {len(records)} documents were left out of the evaluation. The first, "
            f"{skipped[0]['document']}, because of {skipped[0]['skipped']}. {_WHY}"
        )
    result = []
    for source in sources:
        # A document's key is the name of its source, and a number.
        count = sum(record["document"].rpartition(":")[0] == source["name"] for record in skipped)
        reasons = {"texts of the two sides do not align": count} if count else {}
        documents = source["documents"] - count
        result.append(source | {"documents": documents, "skipped": source["skipped"] | reasons})
    return result

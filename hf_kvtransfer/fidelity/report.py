"""The evidence: what an evaluation found, in a file beside the mapper's weights."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from ..errors import EvidenceError
from ..identity import ModelIdentity
from ..whole_files import whole_file
from .results import PassageResult, check_results
from .statistics import figures
from .tables import tables
from .verification import disagreement, probe_problem


FIDELITY_FILE = "fidelity.json"
FORMAT_VERSION = 1

_EVALUATE = "Run the evaluation again: `hf-kvtransfer evaluate MAPPER --source ... --target ... --data ...`."
_DIGEST = '  "digest": '
_SIDE: dict[str, type] = {"identity": dict, "cache_policy": dict}
_MAPPER: dict[str, type] = {"name": str, "digest": str}


@dataclasses.dataclass
class FidelityReport:
    """
    What an evaluation found about a mapper between two models.

    Args:
        mapper (`dict`):
            `name`, the `digest` of its weights, and `native_layers`, the last of the layers that it leaves to the
            target, if there are any.
        source (`dict`), target (`dict`):
            For each model its `identity` (see [`ModelIdentity`]) and the `cache_policy` it was evaluated with.
        data (`list[dict]`):
            For each source of text its `name`, `sha256` and number of `documents`.
        settings (`dict`):
            Of the evaluation, such as lengths in tokens, sinks, tail and seed.
        versions (`dict`):
            Of the libraries.
        results (`list[PassageResult]`):
            One row for each scored passage.
        probe (`dict`, *optional*):
            The probe's calibrated band and operating curve.
        created (`str`, *optional*):
            ISO date, UTC. Now, if left out.
        figures (`dict`, *optional*):
            As [`~fidelity.statistics.figures`] gives them. Computed if left out, from the results as they will be
            written: rounded to the digits that were measured.

    Raises:
        `EvidenceError`: figures are to be computed from results that hold NaN, Inf or impossible numbers.
    """

    mapper: dict[str, Any]
    source: dict[str, Any]
    target: dict[str, Any]
    data: list[dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, Any]
    results: list[PassageResult]
    probe: dict[str, Any] | None = None
    created: str | None = None
    figures: dict[str, Any] | None = None

    def __post_init__(self):
        if self.created is None:
            self.created = datetime.now(UTC).isoformat(timespec="seconds")
        if self.figures is None:
            check_results(self.results)
            self.results = [row.rounded() for row in self.results]
            self.figures = figures(self.results)
        self._figures_of: dict[frozenset[str], dict[str, Any]] = {}
        self._identities: dict[str, tuple[dict, ModelIdentity]] = {}

    def save(self, folder_or_file: str | Path) -> Path:
        """
        Write the report, at once or not at all.

        Args:
            folder_or_file (`str` or `Path`):
                A folder, made if it is not there, in which to write `fidelity.json`; or a file that ends in `.json`.

        Returns:
            `Path`: The file.

        Raises:
            `EvidenceError`: the report could not be loaded again: it holds NaN, or its figures are not those of its
                results.
        """
        path = _file(folder_or_file)
        try:
            self.check()
            text = _with_digest(_layout(self._payload()))
        except (ValueError, EvidenceError) as error:
            raise EvidenceError(f"The report is not written to {path}: {error}") from error
        with whole_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder_or_file: str | Path) -> "FidelityReport":
        """
        Read a report and verify it: nothing edited, nothing missing, means that follow from the results. Intervals are
        covered by the digest alone.

        Args:
            folder_or_file (`str` or `Path`):
                A mapper's folder, or a file that ends in `.json`.

        Returns:
            `FidelityReport`: The report.

        Raises:
            `EvidenceError`: naming the file, what is wrong with it and what to do.
        """
        path = _file(folder_or_file)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise EvidenceError(f"There is no evidence at {path}. {_EVALUATE}") from error
        except OSError as error:
            raise EvidenceError(f"{path} cannot be read ({error}). Check its permissions.") from error
        except ValueError as error:
            raise EvidenceError(f"{path} is no evidence: it is not text ({error}). {_EVALUATE}") from error
        try:
            return cls._from_text(text)
        except (ValueError, RecursionError) as error:
            raise EvidenceError(
                f"{path} is no evidence: it is damaged, cut short or not JSON ({error}). {_EVALUATE}"
            ) from error
        except EvidenceError as error:
            raise EvidenceError(f"{path} is no evidence: {error} {_EVALUATE}") from error

    def identity(self, side: str) -> ModelIdentity:
        """
        The model that was measured.

        Args:
            side (`str`):
                `"source"` or `"target"`.

        Raises:
            `KeyError`, `TypeError`, `ValueError`: the report does not say, or it is damaged.
        """
        written = getattr(self, side)["identity"]
        known = self._identities.get(side)
        if known is None or known[0] is not written:
            known = self._identities[side] = written, ModelIdentity.from_dict(written)
        return known[1]

    def figures_of(self, capabilities: Sequence[str]) -> dict[str, Any]:
        """The figures of some capabilities alone, see [`figures`]. At least one of them must have results."""
        key = frozenset(capabilities)
        if key not in self._figures_of:
            self._figures_of[key] = figures([row for row in self.results if row.capability in key])
        return self._figures_of[key]

    def to_markdown(self) -> str:
        """The report as Markdown that can be read in a terminal, too."""
        data = ", ".join(f"{source.get('name')} ({source.get('documents')} documents)" for source in self.data)
        head = [
            f"## Fidelity of {self.mapper['name']}",
            f"- Source: {_side(self.source)}\n- Target: {_side(self.target)}\n- Data: {data}\n"
            f"- Settings: {_listed(self.settings)}\n- Versions: {_listed(self.versions)}\n- Evaluated: {self.created}",
        ]
        return "\n\n".join(head + [table.to_markdown() for table in tables(self)]) + "\n"

    def _payload(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "results"]
        entries = {name: getattr(self, name) for name in names}
        # The long part comes last.
        return {"format_version": FORMAT_VERSION, **entries, "results": [row.to_dict() for row in self.results]}

    @classmethod
    def _from_text(cls, text: str) -> "FidelityReport":
        payload = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(payload, dict):
            raise EvidenceError("it does not hold a report.")
        version = payload.get("format_version")
        if version != FORMAT_VERSION:
            raise EvidenceError(
                f"its `format_version` is {version!r}, and this version of hf-kvtransfer reads {FORMAT_VERSION}. "
                "Update hf-kvtransfer, or replace the file."
            )
        if text != _with_digest(text.rpartition(_DIGEST)[0]):
            raise EvidenceError("its digest does not match, so it was edited after the evaluation, or damaged.")
        del payload["format_version"], payload["digest"]
        names = {field.name for field in dataclasses.fields(cls)}
        if payload.keys() != names:
            raise EvidenceError(f"missing or unknown entries: {', '.join(sorted(payload.keys() ^ names))}.")
        if not isinstance(payload["results"], list) or payload["figures"] is None:
            raise EvidenceError("it has no list of results, or no figures.")
        report = cls(**payload | {"results": [PassageResult.from_dict(row) for row in payload["results"]]})
        report.check()
        return report

    def check(self) -> None:
        """
        Check what a report must hold to be evidence.

        Raises:
            `EvidenceError`: entries are of a wrong type, results impossible, or figures not those of the results.
        """
        for name, kind in (("data", list), ("settings", dict), ("versions", dict), ("created", str)):
            if not isinstance(getattr(self, name), kind):
                raise EvidenceError(f"`{name}` is {getattr(self, name)!r}, not a {kind.__name__}.")
        if not all(isinstance(source, dict) for source in self.data):
            raise EvidenceError(f"`data` is {self.data!r}, not a list of dicts.")
        for name, entries in (("mapper", _MAPPER), ("source", _SIDE), ("target", _SIDE)):
            value = getattr(self, name)
            for entry, entry_kind in entries.items():
                if not isinstance(value, dict) or not isinstance(value.get(entry), entry_kind):
                    raise EvidenceError(f"`{name}` has no `{entry}` that is a {entry_kind.__name__}.")
        native_layers = self.mapper.get("native_layers")
        if native_layers is not None and type(native_layers) is not int:
            raise EvidenceError(f"`mapper.native_layers` is {native_layers!r}, not the number of a layer.")
        problem = disagreement(self.figures, self.results) or probe_problem(self.probe)
        if problem:
            raise EvidenceError(f"{problem}.")
        if "translated" not in self.figures["arms"]:
            raise EvidenceError("the arm 'translated' is missing, so that nothing is said about the mapper.")


def _file(folder_or_file: str | Path) -> Path:
    path = Path(folder_or_file)
    return path if path.suffix == ".json" and not path.is_dir() else path / FIDELITY_FILE


def _with_digest(text: str) -> str:
    """
    The whole file: its last but one line is the SHA-256 of all lines before.

    The text is hashed and not what it says: to write 500 results again for that takes longer than to load them.
    """
    return f'{text}{_DIGEST}"{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


def _layout(payload: dict[str, Any]) -> str:
    """JSON to be read, and compared, line by line: each result is one, and so is what holds only plain values."""
    # As JSON has it: text for keys, lists for tuples, nothing that is not a number.
    payload = json.loads(json.dumps(payload, allow_nan=False))
    results = ",\n".join("    " + json.dumps(row) for row in payload["results"])
    entries = [
        f"  {json.dumps(key)}: " + (f"[\n{results}\n  ]" if key == "results" else _indented(value, "  "))
        for key, value in payload.items()
    ]
    return "{\n" + ",\n".join(entries) + ",\n"


def _indented(value: Any, indent: str) -> str:
    if not isinstance(value, dict | list):
        return json.dumps(value)
    inner = value.values() if isinstance(value, dict) else value
    if not any(isinstance(entry, dict | list) for entry in inner):
        return json.dumps(value)
    entries = [_indented(entry, indent + "  ") for entry in inner]
    opening, closing = "[]"
    if isinstance(value, dict):
        opening, closing = "{}"
        entries = [f"{json.dumps(key)}: {entry}" for key, entry in zip(value, entries, strict=True)]
    return opening + ",".join(f"\n{indent}  {entry}" for entry in entries) + f"\n{indent}{closing}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a number")


def _side(side: dict[str, Any]) -> str:
    return f"{side['identity'].get('name')} (cache: {_listed(side['cache_policy'])})"


def _listed(entries: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in entries.items())

"""`find_mappers`: which mappers are there for a pair, and may they be used?"""

import dataclasses

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel

from ..compat import model_name
from ..errors import EvidenceError, HubError
from ..fidelity.gate import FidelityGate, Verdict
from ..fidelity.no_evidence import NO_EVIDENCE
from ..fidelity.report import FIDELITY_FILE, FidelityReport
from .card import LIBRARY, pair_tags
from .download import HUB_ERRORS, advice


@dataclasses.dataclass(frozen=True)
class FoundMapper:
    """
    A mapper on the Hub.

    Args:
        repo_id (`str`), revision (`str`):
            Where it is, and the commit that was judged.
        verdict ([`Verdict`]):
            Of the gate, on the evidence alone: models and weights are compared when it is used.
        gap_recovered (`float`, *optional*):
            Of all that was measured; `None` if that is not known.
    """

    repo_id: str
    revision: str
    verdict: Verdict
    gap_recovered: float | None

    def __str__(self) -> str:
        return f"{self.verdict} (at {self.revision[:7]})"


def find_mappers(
    source: str | PreTrainedModel,
    target: str | PreTrainedModel,
    *,
    gate: FidelityGate | None = None,
    limit: int = 20,
    token: bool | str | None = None,
) -> list[FoundMapper]:
    """
    Mappers from one model's cache to another's, by the tags of their cards. Only their evidence is downloaded.

    Args:
        source (`str` or `PreTrainedModel`), target (`str` or `PreTrainedModel`):
            Hub ids, or models that were loaded by theirs.
        gate ([`FidelityGate`], *optional*):
            What the use at hand asks for.
        limit (`int`, *optional*, defaults to 20):
            The most that are looked at.
        token (`bool` or `str`, *optional*):
            For private repositories.

    Returns:
        `list[FoundMapper]`: Those that the gate admits first, each time the one that recovers most of the gap first.

    Raises:
        `HubError`: the Hub cannot be reached.
    """
    names = [side if isinstance(side, str) else model_name(side) for side in (source, target)]
    api = HfApi(token=token, library_name=LIBRARY)
    try:
        found = [
            _judge(model.id, model.sha, gate or FidelityGate(), token)
            for model in api.list_models(filter=pair_tags(*names), full=True, limit=limit)
        ]
    except HUB_ERRORS as error:
        todo = advice(error) or "Check the network and HF_HUB_OFFLINE."
        raise HubError(f"The Hub cannot be asked for mappers from {names[0]} to {names[1]}: {error} {todo}") from error
    return sorted(found, key=lambda mapper: (not mapper.verdict.admitted, -(mapper.gap_recovered or 0.0)))


def _judge(repo_id: str, revision: str, gate: FidelityGate, token: bool | str | None) -> FoundMapper:
    gap, reasons = None, [NO_EVIDENCE]
    try:
        report = FidelityReport.load(hf_hub_download(repo_id, FIDELITY_FILE, revision=revision, token=token))
        overall = report.figures["arms"]["translated"]["gap_recovered"]
        gap, reasons = overall and overall["value"], gate.judge(report)
    except EntryNotFoundError:
        pass
    except EvidenceError as error:
        reasons = [str(error)]
    return FoundMapper(repo_id, revision, gate.verdict(repo_id, reasons), gap)

"""Translate a language model's KV cache to another model's, instead of reading the context again."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AlignmentError,
    BatchMismatchError,
    CalibrationError,
    ConversationError,
    EvaluationDataError,
    EvidenceError,
    HubError,
    KVTransferError,
    MapperFormatError,
    PairMismatchError,
    PrefixMismatchError,
    RefusedError,
    SourceCacheError,
    TokenizerMismatchError,
    UnknownModelError,
    UnsupportedModelError,
)


if TYPE_CHECKING:
    from .adapter_mapper import adapter_mapper
    from .cache import TranslatedCache
    from .conversation import Conversation, Reply, TurnReport
    from .fidelity.evaluate import evaluate_mapper
    from .fidelity.gate import FidelityGate, Verdict
    from .fidelity.report import FidelityReport
    from .fidelity.shadow import ShadowTransfer
    from .fitting import calibrate_readout, distill_mapper, fit_mapper, train_residuals
    from .generation import generate
    from .geometry import KVGeometry
    from .hub.search import FoundMapper, find_mappers
    from .identity import ModelIdentity
    from .mapper import KVMapper, KVMapperConfig
    from .policy import Decision, MeasuredCosts, TransferPolicy, measure_costs
    from .segments.segment import Segment
    from .source import SourceKV
    from .transfer_report import TransferReport


__version__ = "0.1.0.dev0"

__all__ = [
    "AlignmentError",
    "BatchMismatchError",
    "CalibrationError",
    "Conversation",
    "ConversationError",
    "Decision",
    "EvaluationDataError",
    "EvidenceError",
    "FidelityGate",
    "FidelityReport",
    "FoundMapper",
    "HubError",
    "KVGeometry",
    "KVMapper",
    "KVMapperConfig",
    "KVTransferError",
    "MapperFormatError",
    "MeasuredCosts",
    "ModelIdentity",
    "PairMismatchError",
    "PrefixMismatchError",
    "RefusedError",
    "Reply",
    "Segment",
    "ShadowTransfer",
    "SourceCacheError",
    "SourceKV",
    "TokenizerMismatchError",
    "TransferPolicy",
    "TransferReport",
    "TranslatedCache",
    "TurnReport",
    "UnknownModelError",
    "UnsupportedModelError",
    "Verdict",
    "adapter_mapper",
    "calibrate_readout",
    "distill_mapper",
    "evaluate_mapper",
    "find_mappers",
    "fit_mapper",
    "generate",
    "measure_costs",
    "train_residuals",
]

# Imported when first asked for: `hf-kvtransfer --help` need not wait for torch and transformers.
_MODULES = {
    "Conversation": ".conversation",
    "Decision": ".policy",
    "FidelityGate": ".fidelity.gate",
    "FidelityReport": ".fidelity.report",
    "FoundMapper": ".hub.search",
    "KVGeometry": ".geometry",
    "KVMapper": ".mapper",
    "KVMapperConfig": ".mapper",
    "MeasuredCosts": ".policy",
    "ModelIdentity": ".identity",
    "Reply": ".conversation",
    "Segment": ".segments.segment",
    "ShadowTransfer": ".fidelity.shadow",
    "SourceKV": ".source",
    "TransferPolicy": ".policy",
    "TransferReport": ".transfer_report",
    "TranslatedCache": ".cache",
    "TurnReport": ".conversation",
    "Verdict": ".fidelity.gate",
    "adapter_mapper": ".adapter_mapper",
    "calibrate_readout": ".fitting",
    "distill_mapper": ".fitting",
    "evaluate_mapper": ".fidelity.evaluate",
    "find_mappers": ".hub.search",
    "fit_mapper": ".fitting",
    "generate": ".generation",
    "measure_costs": ".policy",
    "train_residuals": ".fitting",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

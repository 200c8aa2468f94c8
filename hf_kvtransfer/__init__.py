"""Translate a language model's KV cache to another model's, instead of reading the context again."""

from .cache import TranslatedCache
from .errors import (
    AlignmentError,
    BatchMismatchError,
    CalibrationError,
    KVTransferError,
    MapperFormatError,
    PairMismatchError,
    PrefixMismatchError,
    SourceCacheError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from .fitting import fit_mapper
from .geometry import KVGeometry
from .mapper import KVMapper, KVMapperConfig
from .source import SourceKV
from .translation import TransferReport


__version__ = "0.1.0.dev0"

__all__ = [
    "AlignmentError",
    "BatchMismatchError",
    "CalibrationError",
    "KVGeometry",
    "KVMapper",
    "KVMapperConfig",
    "KVTransferError",
    "MapperFormatError",
    "PairMismatchError",
    "PrefixMismatchError",
    "SourceCacheError",
    "SourceKV",
    "TokenizerMismatchError",
    "TransferReport",
    "TranslatedCache",
    "UnsupportedModelError",
    "fit_mapper",
]

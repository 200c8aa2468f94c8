"""The errors of this library. Each names what was found, what was expected and what to do."""


class KVTransferError(Exception):
    """Base class: catch this to fall back to a prefill."""


class UnsupportedModelError(KVTransferError):
    """A model whose cache cannot be read or written token by token."""


class SourceCacheError(KVTransferError):
    """A source cache that does not hold every token it stands for."""


class TokenizerMismatchError(KVTransferError):
    """A tokenizer other than the one a mapper was fitted with, or one that cannot be aligned."""


class AlignmentError(KVTransferError):
    """Two token sequences that do not stand for the same text."""


class PairMismatchError(KVTransferError):
    """A mapper used on models that it was not fitted for."""


class MapperFormatError(KVTransferError):
    """A mapper artifact that is incomplete, damaged or of an unknown format."""


class BatchMismatchError(KVTransferError):
    """A batch that the cache cannot serve."""


class PrefixMismatchError(KVTransferError):
    """A prompt that does not start with the tokens that the cache stands for."""


class CalibrationError(KVTransferError):
    """Calibration text that a mapper cannot be fitted on."""


class EvaluationDataError(KVTransferError):
    """Text, dialogues or questions that a mapper cannot be evaluated on."""


class EvidenceError(KVTransferError):
    """A mapper's evidence that is damaged, edited, or about something else."""


class RefusedError(KVTransferError):
    """A translation that the evidence or the probe does not allow, or that the policy finds not worth it."""


class HubError(KVTransferError):
    """The Hugging Face Hub cannot be reached, or does not do what it is asked for."""


class UnknownModelError(KVTransferError):
    """A name that no model has where it is used."""


class ConversationError(KVTransferError):
    """A conversation that cannot be continued as asked, or that was saved otherwise."""

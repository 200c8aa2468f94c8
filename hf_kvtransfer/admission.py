"""Which mappers a request may use: they are loaded and the gate is asked, once for each mapper and source."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from .errors import RefusedError
from .fidelity.gate import FidelityGate, Verdict
from .identity import ModelIdentity
from .mapper import KVMapper, mapper_for
from .source import SourceKV


class Admission:
    """
    Admits mappers to one request.

    Args:
        gate ([`FidelityGate`], *optional*):
            What is asked of the evidence.
        target (`PreTrainedModel`), target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The model that will continue.
        sink_tokens (`int`, *optional*), tail_tokens (`int`, *optional*), storage (`Cache`, *optional*):
            As of [`TranslatedCache`]. `None` for a tail that is not that of what is translated.
        revision (`str`, *optional*):
            Of mappers that are named by a Hub id.
    """

    def __init__(
        self,
        gate: FidelityGate | None,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase | None,
        sink_tokens: int | None,
        tail_tokens: int | None,
        storage: Cache | None,
        revision: str | None = None,
    ):
        self.gate, self.target, self.revision = gate or FidelityGate(), target, revision
        self._options = {
            "target_tokenizer": target_tokenizer,
            "sink_tokens": sink_tokens,
            "tail_tokens": tail_tokens,
            "target_cache": storage,
        }
        self._loaded: dict[str, KVMapper] = {}
        self._asked: list[tuple[KVMapper, ModelIdentity, Verdict]] = []

    def admit(self, mapper: KVMapper | str | Path, source_kv: SourceKV) -> KVMapper:
        """
        The mapper, loaded.

        Raises:
            `MapperFormatError`: it cannot be loaded.
            `RefusedError`: the gate does not admit it.
        """
        if not isinstance(mapper, KVMapper):
            name = str(mapper)
            if name not in self._loaded:
                self._loaded[name] = mapper_for(name, self.target, self.revision or "main")
            mapper = self._loaded[name]
        given = (v for known, identity, v in self._asked if known is mapper and identity is source_kv.identity)
        verdict = next(given, None)
        if verdict is None:
            verdict = self.gate.admit(mapper, source_kv, self.target, **self._options)
            self._asked.append((mapper, source_kv.identity, verdict))
        if not verdict.admitted:
            raise RefusedError(str(verdict))
        return mapper

    @property
    def mappers(self) -> list[KVMapper]:
        """Those that the gate was asked about."""
        return list({id(mapper): mapper for mapper, _, _ in self._asked}.values())

    @property
    def verdict(self) -> Verdict | None:
        """
        The gate's only one; of several, one that has admitted a mapper in spite of something, or else any that has
        admitted one. `None` if none was admitted or none was asked about.
        """
        verdicts = [verdict for _, _, verdict in self._asked]
        if len(verdicts) == 1:
            return verdicts[0]
        admitted = [verdict for verdict in verdicts if verdict.admitted]
        return max(admitted, key=lambda verdict: len(verdict.reasons), default=None)

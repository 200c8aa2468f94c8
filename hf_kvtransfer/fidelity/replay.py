"""One passage, continued by the target on caches of several origins: the arms of an evaluation."""

import copy
import dataclasses
from collections.abc import Iterable
from functools import cached_property

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..alignment.spans import encode_with_spans
from ..compat import read_into_cache
from ..effort import read_again
from ..geometry import KVGeometry
from ..identity import ModelIdentity
from ..layers import install
from ..mapper import KVMapper
from ..pair import check_pair
from ..source import SourceKV
from ..translation import Translation
from .altered_maps import random_map, raw_source
from .arms import ARMS, effort_of, in_order
from .data import Passage
from .results import ArmScore
from .scoring import compare, read_continuations


@dataclasses.dataclass
class NativeCache:
    """What the target has read itself, to be extended from one turn of a dialogue to the next. Starts empty."""

    input_ids: list[int] = dataclasses.field(default_factory=list)
    cache: DynamicCache | None = None


class Replay:
    """
    Scores passages in all arms: on the same positions, through the same code, on caches that differ in origin.

    Every arm has the context in a cache, except for its last tokens, those that the translation holds back. The target
    reads these and the continuation in one forward pass. The arms are

    - `native`: the target's own prefill.
    - `translated`: what the mapper makes of the source's cache.
    - `effort 0.15`, and with other shares: the same, with some of its tokens read again, as [`TranslatedCache`] with
      this `effort` chooses them when it is given the context. What is scored, nobody sees before.
    - `other_document`: the same of another document, as far as both reach.
    - `no_context`: the tokens only that the target reads itself in every translation (attention sinks), at least one.
    - `raw_source`: the source's states as they are, under the target's rotary embedding.
    - `random_map`: the mapper with each output's weights in random order.

    Layers that a mapper leaves to the target (native ones) are the target's own in all of them: of this context, or in
    `other_document` of the other one. What a control recovers thus includes what they recover by themselves.

    Args:
        mapper ([`KVMapper`]):
            Fitted for the pair.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models, in eval mode.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers. One is enough if they share it, none for token ids of one vocabulary.
        sink_tokens (`int`, *optional*):
            First tokens that the target reads itself, by default as in the mapper's fit.
        tail_tokens (`int`, *optional*, defaults to 1):
            Last tokens of a context that it reads itself, of a shorter one all but the first.
        seed (`int`, *optional*, defaults to 0):
            Of the random map.

    Raises:
        `PairMismatchError`, `TokenizerMismatchError`: the mapper is not for these models and tokenizers.
        `ValueError`: a model is in training mode, or `tail_tokens` is below 1.
    """

    def __init__(
        self,
        mapper: KVMapper,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        sink_tokens: int | None = None,
        tail_tokens: int = 1,
        seed: int = 0,
    ):
        if tail_tokens < 1:
            raise ValueError(f"`tail_tokens` must be at least 1, to predict the next one from, got {tail_tokens}.")
        for side, model in (("source", source), ("target", target)):
            if model.training:
                raise ValueError(
                    f"`{side}` is in training mode, where dropout is at work: call `{side}.eval()` first."
                )
        self.mapper, self.source, self.target = mapper, source, target
        self.source_tokenizer = source_tokenizer or target_tokenizer
        self.target_tokenizer = target_tokenizer or source_tokenizer
        self.sink_tokens = mapper.config.sink_tokens if sink_tokens is None else sink_tokens
        self.tail_tokens, self.seed = tail_tokens, seed
        # Before anything is read: a source that has read nothing is enough to see whether the pair fits.
        nothing = torch.zeros(1, 0, dtype=torch.long)
        identity = ModelIdentity.from_model(source, self.source_tokenizer)
        unread = SourceKV([], KVGeometry.from_model(source), nothing, nothing, nothing, identity)
        check_pair(mapper, unread, target, KVGeometry.from_model(target), self.target_tokenizer)

    def read_source(self, passage: Passage, longer: SourceKV | None = None) -> SourceKV:
        """
        Let the source read a passage's context.

        Args:
            passage ([`Passage`]):
                The passage.
            longer ([`SourceKV`], *optional*):
                What the source has read of a later turn. Where it begins with this one's tokens, a view of it is
                returned, and nothing is read.
        """
        if longer is not None:
            ids = passage.source_ids
            if ids is None:
                ids, _ = encode_with_spans(self.source_tokenizer, passage.source_text)
            if longer.input_ids[0, : len(ids)].tolist() == ids:
                return longer[: len(ids)]
        text = passage.source_text if passage.source_ids is None else torch.tensor([passage.source_ids])
        return SourceKV.prefill(self.source, self.source_tokenizer, text)

    def translate(self, passage: Passage, source_kv: SourceKV) -> Translation:
        """
        Bind what the source has read of a passage's context to the target's tokens of it.

        Raises:
            `AlignmentError`, `PrefixMismatchError`: the two are not the same text.
        """
        return Translation(
            source_kv,
            self.mapper,
            self.target,
            target_tokenizer=self.target_tokenizer,
            input_ids=torch.tensor([passage.target_ids]),
            sink_tokens=self.sink_tokens,
            tail_tokens=max(1, min(self.tail_tokens, len(passage.target_ids) - 1)),
        )

    def score(
        self,
        passage: Passage,
        source_kv: SourceKV | None = None,
        *,
        arms: Iterable[str] = ARMS,
        donor: Translation | None = None,
        native_cache: NativeCache | None = None,
    ) -> dict[str, ArmScore]:
        """
        Continue a passage in several arms.

        Args:
            passage ([`Passage`]):
                The passage.
            source_kv ([`SourceKV`], *optional*):
                What the source has read of its context; by default it reads it now.
            arms (`Iterable[str]`, *optional*):
                Of [`ARMS`], by default all of them, and of efforts, see [`effort_arm`]. `native` is always there.
                `other_document` is left out without a donor, `raw_source` where the two models cache other shapes.
            donor ([`Translation`], *optional*):
                Of another document.
            native_cache ([`NativeCache`], *optional*):
                What the target has read of the turns before. It is extended to this context, or made anew where this
                context begins in another way.

        Returns:
            `dict[str, ArmScore]`: In the order of [`in_order`].

        Raises:
            `AlignmentError`, `PrefixMismatchError`: what the source has read is not the text of the target's context.
            `EvaluationDataError`: a loss is not finite.
            `UnsupportedModelError`: an arm has an effort, and the target cannot read single tokens again.
        """
        arms = set(arms)
        if unknown := sorted(arms - set(in_order(arms))):
            raise ValueError(f"`arms` holds {unknown}, known are {list(ARMS)}, and efforts as 'effort 0.15'.")
        translation = self.translate(passage, self.read_source(passage) if source_kv is None else source_kv)
        cache = self._read(passage.target_ids[:-1], native_cache)
        native = read_continuations(self.target, cache, passage, passage.target_ids[-1:])
        scores = {"native": compare("native", native, native, passage)}
        # The same in all other arms: a template's last tokens are no merit of the cache before them.
        tail = passage.target_ids[translation.length :]
        for arm in in_order(arms - {"native"}):
            cache = self._cache(arm, translation, donor, passage)
            if cache is not None:
                reading = read_continuations(self.target, cache, passage, tail)
                scores[arm] = compare(arm, reading, native, passage)
        return scores

    def _cache(
        self, arm: str, translation: Translation, donor: Translation | None, passage: Passage
    ) -> DynamicCache | None:
        """The context of an arm, `None` if there is no such arm here."""
        if arm == "no_context":
            return self._read(passage.target_ids[: min(max(self.sink_tokens, 1), translation.length)])
        length = translation.length
        if effort := effort_of(arm):
            return install(self._empty_cache(), read_again(translation, translation, effort)[0])
        if arm == "other_document":
            if donor is None:
                return None
            translation, length = donor, min(donor.length, length)
        elif arm != "translated":
            mapper = self._raw_source if arm == "raw_source" else self._random_map
            if mapper is None:
                return None
            translation = translation.with_mapper(mapper)
        return install(self._empty_cache(), translation, length)

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.target.config)

    def _read(self, input_ids: list[int], before: NativeCache | None = None) -> DynamicCache:
        """A cache of what the target reads itself."""
        held = before or NativeCache()
        if held.cache is None or held.input_ids != input_ids[: len(held.input_ids)]:
            held.input_ids, held.cache = [], self._empty_cache()
        if new := input_ids[len(held.input_ids) :]:
            read_into_cache(self.target, held.cache, torch.tensor([new]))
            held.input_ids = list(input_ids)
        # A window that is full cannot be cropped back to where it was.
        return held.cache if before is None else copy.deepcopy(held.cache)

    @cached_property
    def _raw_source(self) -> KVMapper | None:
        return raw_source(self.mapper)

    @cached_property
    def _random_map(self) -> KVMapper:
        return random_map(self.mapper, self.seed)

"""One family: its model, what it has read, and how to compare two ways of continuing."""

import dataclasses
import functools

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvtransfer import KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument, read_into_cache

from ..tiny_models import identity_mapper, random_ids, ungated_cache
from .families import build


# Longer than the windows and the chunks of the tiny models.
CONTEXT, PROMPT, NEW = 19, 24, 3


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    model: PreTrainedModel
    mapper: KVMapper
    prompts: torch.Tensor  # of 3 rows
    mask: torch.Tensor  # for the same prompts as rows of three lengths

    @classmethod
    @functools.cache
    def of(cls, family: str) -> "Case":
        model = build(family)
        mask = torch.ones(3, PROMPT, dtype=torch.long)
        mask[1, :3], mask[2, :11] = 0, 0
        return cls(family, model, identity_mapper(model, sink_tokens=2), random_ids(model, 3, PROMPT), mask)

    @property
    def prompt(self) -> torch.Tensor:
        return self.prompts[:1]

    @functools.cache  # noqa: B019
    def source_kv(self, rows: int, padded: bool = False) -> SourceKV:
        mask = self.mask[:rows, :CONTEXT] if padded else None
        return SourceKV.prefill(self.model, None, self.prompts[:rows, :CONTEXT], attention_mask=mask)

    def translated(self, rows: int = 1, padded: bool = False, **options) -> TranslatedCache:
        """A cache of what the first rows of the prompts begin with."""
        return ungated_cache(self.source_kv(rows, padded), self.mapper, self.model, tail_tokens=0, **options)

    def misread(self, ids: torch.Tensor, shift: int) -> TranslatedCache:
        """A cache of tokens that the source has read `shift` positions further on than it says."""
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()
        positions = torch.arange(ids.shape[1])[None]
        read_into_cache(self.model, cache, ids, position_ids=positions + shift)
        source_kv = SourceKV.from_cache(cache, self.model, ids, position_ids=positions)
        return ungated_cache(source_kv, self.mapper, self.model, tail_tokens=0, sink_tokens=0)

    def given(self, cache: DynamicCache) -> dict:
        return {cache_argument(self.model): cache}

    def generate(self, ids: torch.Tensor, **options) -> torch.Tensor:
        """Sequences of a plain `generate`."""
        # Without a mask each token that is the padding token's would be padding.
        mask = {} if ids is None else {"attention_mask": torch.ones_like(ids)}
        options = {"max_new_tokens": NEW, "do_sample": False} | mask | options
        torch.manual_seed(0)  # for those that sample
        return self.model.generate(ids, **options)

    def assert_native(self, ids: torch.Tensor, cache: DynamicCache | None, run=None, **options) -> None:
        """
        `generate` on a translated cache gives what it gives without one: tokens, logits and scores of all steps.

        Args:
            ids (`torch.LongTensor`):
                The prompts.
            cache (`DynamicCache`, *optional*):
                What they begin with.
            run (`Callable`, *optional*):
                In place of `generate` for the translated cache, which it gets in its own way.
            options:
                For both.
        """
        options |= {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
        given = {} if run is not None else self.given(cache)
        found = (run or self.generate)(ids, **options, **given)
        native = self.generate(ids, **options)
        assert torch.equal(found.sequences, native.sequences)
        for name in ("logits", "scores", "sequences_scores"):
            if getattr(native, name, None) is not None:
                close(getattr(found, name), getattr(native, name))


def close(found, native) -> None:
    """Within 1e-5."""
    torch.testing.assert_close(found, native, rtol=0, atol=1e-5)

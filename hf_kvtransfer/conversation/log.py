"""What one model of a conversation holds: its tokens, who has read each of them, and its cache."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..completeness import check_holds_every_token
from ..errors import SourceCacheError
from ..geometry import KVGeometry
from ..identity import ModelIdentity
from ..layers import PendingLayer
from ..source import SourceKV
from .prompt import ReadText


@dataclasses.dataclass
class ModelLog:
    """
    The state of one model.

    Args:
        read ([`ReadText`]):
            What its cache stands for.
        readers (`list[str]`):
            For each token the model that has read it. Those of others are translated in this model's cache.
        cache (`Cache`):
            Holds all of these tokens in all layers.
        identity ([`ModelIdentity`]):
            The model as it was when it read them.
        turn (`int`):
            The last turn in which it replied.
    """

    read: ReadText
    readers: list[str]
    cache: Cache
    identity: ModelIdentity
    turn: int

    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(
            states.nbytes
            for layer in self.cache.layers
            if not isinstance(layer, PendingLayer) and getattr(layer, "keys", None) is not None
            for states in (layer.keys, layer.values)
        )

    def is_complete(self, model: PreTrainedModel) -> bool:
        """Whether every layer of the cache holds every token."""
        try:
            check_holds_every_token(self.cache, KVGeometry.from_model(model), 1, len(self.read.ids))
        except SourceCacheError:
            return False
        return True

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens are those of the cache. The prompt's last one is always to be read."""
        pairs = zip(self.read.ids, ids[:-1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def stretch(self, name: str, token: int) -> tuple[int, int]:
        """The tokens around one that a model has read, without others between them."""
        start, stop = token, token + 1
        while start and self.readers[start - 1] == name:
            start -= 1
        while stop < len(self.readers) and self.readers[stop] == name:
            stop += 1
        return start, stop

    def source_kv(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, start: int, stop: int) -> SourceKV:
        """What the model has read of a range of tokens."""
        return SourceKV.from_cache(
            self.cache,
            model,
            torch.tensor([self.read.ids]),
            tokenizer=tokenizer,
            text=[self.read.text],
            spans=torch.tensor([self.read.spans]),
            tokens=slice(start, stop),
        )

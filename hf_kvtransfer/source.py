"""A model's cache made portable: keys without position, values, and the tokens that they stand for."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from .adapters import check_filled_with_adapters
from .alignment.spans import encode_with_spans
from .cache_policy import cache_policy
from .compat import read_into_cache, token_losses
from .completeness import check_holds_every_token, check_read_natively
from .errors import SourceCacheError
from .geometry import KVGeometry
from .identity import ModelIdentity
from .padding import check_same_shape, mask_and_positions, pad_rows
from .rotary import Rotary, RotaryTables
from .source_file import read_source, write_source
from .source_text import cut_text, decode_rows


# Last tokens of a context whose losses are kept: what a probe of the target's loss there is compared with.
NUM_LOSSES = 128


class SourceKV:
    """
    What a model's cache says about the tokens it read, independent of where they stood.

    Make one with [`SourceKV.prefill`] or [`SourceKV.from_cache`]; the constructor takes what these compute.

    Args:
        features (`list[torch.Tensor | None]`):
            For each layer its keys (without rotary embedding) then values, all heads, `[batch, tokens, features]` in
            the dtype of the cache. `None` for a layer that caches nothing of its own.
        geometry (`KVGeometry`):
            What the model caches, layer by layer.
        input_ids (`torch.LongTensor`):
            `[batch, tokens]`, left-padded.
        attention_mask (`torch.LongTensor`):
            `[batch, tokens]`, 0 for padding.
        position_ids (`torch.LongTensor`):
            `[batch, tokens]`, the positions at which the model read the tokens.
        text (`Sequence[str]`, *optional*), spans (`torch.LongTensor`, *optional*):
            The text of each row, and for each token the characters it stands for, `[batch, tokens, 2]`.
        identity ([`ModelIdentity`]):
            Which model and tokenizer read the tokens.
        token_losses (`torch.Tensor`, *optional*):
            What the model itself lost on its tokens, in nats, `[batch, tokens]`; NaN where it is not known.
        cache_policy (`dict`, *optional*):
            How the cache stored the tokens, see [`cache_policy`].
    """

    def __init__(
        self,
        features: list[torch.Tensor | None],
        geometry: KVGeometry,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        identity: ModelIdentity,
        text: Sequence[str] | None = None,
        spans: torch.Tensor | None = None,
        token_losses: torch.Tensor | None = None,
        cache_policy: dict | None = None,
    ):
        self.features = features
        self.geometry = geometry
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.position_ids = position_ids
        self.identity = identity
        self.text = None if text is None else list(text)
        self.spans = spans
        self.token_losses = token_losses
        self.cache_policy = cache_policy

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def __repr__(self) -> str:
        return f"SourceKV({self.identity.name!r}, batch_size={self.batch_size}, tokens={len(self)})"

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    def key_states(self, layer_idx: int) -> torch.Tensor:
        """Position-free keys of a layer, `[batch, heads, tokens, head_dim]`, a view."""
        return self.geometry.layers[layer_idx].split_heads(self.features[layer_idx])[0]

    def value_states(self, layer_idx: int) -> torch.Tensor:
        """Values of a layer, `[batch, heads, tokens, head_dim]`, a view."""
        return self.geometry.layers[layer_idx].split_heads(self.features[layer_idx])[1]

    def row_spans(self, row: int) -> list[tuple[int, int]]:
        """Characters of each token of a row, padding left out."""
        return [tuple(span) for span in self.spans[row, self.attention_mask[row].bool()].tolist()]

    def only(self, layers: Sequence[int]) -> "SourceKV":
        """The same tokens, with keys and values of some layers only."""
        other = copy.copy(self)
        other.features = [states if i in layers else None for i, states in enumerate(self.features)]
        return other

    def __getitem__(self, tokens: slice) -> "SourceKV":
        """
        A range of tokens, as views. Each row's text is cut to the characters of its remaining tokens.

        Raises:
            `TypeError`: the index is not a slice with step 1.
        """
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise TypeError(f"SourceKV is indexed by a range of tokens such as [10:20], got {tokens!r}.")
        text, spans = cut_text(self.text, self.spans, self.attention_mask, tokens)
        return SourceKV(
            [None if states is None else states[:, tokens] for states in self.features],
            self.geometry,
            self.input_ids[:, tokens],
            self.attention_mask[:, tokens],
            self.position_ids[:, tokens],
            self.identity,
            text,
            spans,
            None if self.token_losses is None else self.token_losses[:, tokens],
            self.cache_policy,
        )

    @classmethod
    def prefill(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        text: str | Sequence[str] | torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        token_losses: bool = True,
    ) -> "SourceKV":
        """
        Let a model read a context, keeping every token also in sliding-window layers.

        Args:
            model (`PreTrainedModel`):
                The model that reads.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Its tokenizer. May be `None` if `text` is token ids and the two models share a tokenizer.
            text (`str`, `Sequence[str]` or `torch.LongTensor`):
                The context, one or a batch, or its token ids `[batch, tokens]`, left-padded.
            attention_mask (`torch.LongTensor`, *optional*):
                Goes with token ids, `[batch, tokens]`.
            token_losses (`bool`, *optional*, defaults to `True`):
                Whether to keep what the model loses on the last tokens, which a probe of the target is sharper with.
                Their logits cost as much as reading some more tokens, where the vocabulary is large as much as many.

        Returns:
            `SourceKV`: On the devices and in the dtype of the model's cache.
        """
        rows, spans = None, None
        if isinstance(text, torch.Tensor):
            input_ids = text if text.dim() == 2 else text[None]
        else:
            rows = [text] if isinstance(text, str) else list(text)
            encoded = [encode_with_spans(tokenizer, row) for row in rows]
            input_ids, attention_mask = pad_rows([ids for ids, _ in encoded])
            spans, _ = pad_rows([torch.tensor(spans).view(-1, 2) for _, spans in encoded])
        if input_ids.shape[1] == 0:
            raise SourceCacheError("`text` has no tokens, there is nothing to prefill.")
        mask, position_ids = mask_and_positions(input_ids, attention_mask, None)
        geometry = KVGeometry.from_model(model)
        # A rotary embedding that depends on the length of the call is refused before the prefill is paid for.
        tables = Rotary.from_model(model).at(position_ids)
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        logits = read_into_cache(
            model,
            cache,
            input_ids,
            num_logits=min(NUM_LOSSES + 1, input_ids.shape[1]) if token_losses else 0,
            attention_mask=None if mask.all() else mask,
            position_ids=position_ids,
        )
        check_holds_every_token(cache, geometry, *input_ids.shape)
        losses = None if logits is None else _last_losses(logits, input_ids, mask)
        return cls._copied(cache, model, tables, input_ids, mask, position_ids, tokenizer, losses, rows, spans)

    @classmethod
    def from_cache(
        cls,
        cache: Cache,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        token_losses: torch.Tensor | None = None,
        text: Sequence[str] | None = None,
        spans: torch.Tensor | None = None,
        tokens: slice | None = None,
    ) -> "SourceKV":
        """
        Take over a cache that a model has filled. The cache is copied, and may be used further.

        Args:
            cache (`Cache`):
                The model's cache. It must hold every token in every layer.
            model (`PreTrainedModel`):
                The model that filled it.
            input_ids (`torch.LongTensor`):
                `[batch, tokens]`, exactly the tokens in the cache: after `generate` without the last sampled one.
            attention_mask (`torch.LongTensor`, *optional*):
                `[batch, tokens]`, needed if rows are padded.
            position_ids (`torch.LongTensor`, *optional*):
                `[batch, tokens]`, defaults to what `generate` uses: counted from each row's first token.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                The model's tokenizer, needed if the target's is another one.
            token_losses (`torch.Tensor`, *optional*):
                What the model lost on the tokens, in nats, `[batch, tokens]`, NaN where it is not known. A probe of
                the target is sharper if it knows what the source expected of the last ones.
            text (`Sequence[str]`, *optional*), spans (`torch.LongTensor`, *optional*):
                Text of each row and characters of each token, `[batch, tokens, 2]`. By default from the tokenizer.
            tokens (`slice`, *optional*):
                The range of tokens to take over, all by default. Of a [`TranslatedCache`] it must be one that the
                model has read itself.

        Raises:
            `SourceCacheError`: the cache does not hold the key and value of every token of `input_ids`, or those
                wanted are translated themselves; or, of a model with adapters of PEFT, others than those that are at
                work now have filled it. To see that, the model reads the first 8 tokens again.
            `UnsupportedModelError`: the model's keys cannot be made position-free.
            `ValueError`: of `text` and `spans` one is given without the other.
        """
        if (text is None) != (spans is None):
            given, missing = ("spans", "text") if text is None else ("text", "spans")
            raise ValueError(f"`{given}` is given without `{missing}`: pass both, or `tokenizer` alone.")
        input_ids = input_ids if input_ids.dim() == 2 else input_ids[None]
        mask, positions = mask_and_positions(input_ids, attention_mask, position_ids)
        if token_losses is not None:
            check_same_shape("token_losses", token_losses, input_ids)
            token_losses = token_losses.float().cpu()
        geometry, rotary = KVGeometry.from_model(model), Rotary.from_model(model)
        start, stop, _ = (tokens or slice(None)).indices(input_ids.shape[1])
        check_read_natively(cache, start, stop)  # first: pending layers need not be translated to be refused
        check_holds_every_token(cache, geometry, *input_ids.shape)
        tables = rotary.at(positions[:, start:stop])
        check_filled_with_adapters(cache, model, geometry, input_ids, mask, positions)
        return cls._copied(
            cache, model, tables, input_ids, mask, positions, tokenizer, token_losses, text, spans, start, stop
        )

    @classmethod
    def _copied(
        cls,
        cache: Cache,
        model: PreTrainedModel,
        tables: RotaryTables,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        position_ids: torch.Tensor,
        tokenizer: PreTrainedTokenizerBase | None,
        token_losses: torch.Tensor | None,
        text: Sequence[str] | None,
        spans: torch.Tensor | None,
        start: int = 0,
        stop: int | None = None,
    ) -> "SourceKV":
        """A range of a cache that was checked; `tables` are for that range, all else is of all tokens."""
        if tokenizer is not None and text is None:
            text, spans = decode_rows(tokenizer, input_ids, mask)
        text, spans = cut_text(text, spans, mask.cpu(), slice(start, stop))
        geometry = KVGeometry.from_model(model)
        return cls(
            _position_free(cache, geometry, tables, start, stop),
            geometry,
            input_ids[:, start:stop].cpu(),
            mask[:, start:stop].cpu(),
            position_ids[:, start:stop].cpu(),
            ModelIdentity.from_model(model, tokenizer),
            text,
            spans,
            None if token_losses is None else token_losses[:, start:stop],
            cache_policy(cache),
        )

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file."""
        write_source(self, path)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "SourceKV":
        """
        Read what [`SourceKV.save`] wrote.

        Args:
            path (`str` or `Path`):
                The file.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Where the keys and values go.

        Raises:
            `SourceCacheError`: the file is missing, damaged or of another format.
        """
        return cls(**read_source(path, device))


def _position_free(
    cache: Cache, geometry: KVGeometry, tables: RotaryTables, start: int, stop: int | None
) -> list[torch.Tensor | None]:
    """Keys without rotary embedding, whose `tables` are for the range of tokens, and values, as in [`SourceKV`]."""
    features: list[torch.Tensor | None] = []
    for layer_idx, layer in enumerate(geometry.layers):
        if layer is None:
            features.append(None)
            continue
        keys, values = cache.layers[layer_idx].keys.detach(), cache.layers[layer_idx].values.detach()
        keys, values = keys[:, :, start:stop], values[:, :, start:stop]
        # Token-major memory: a token's features of all heads lie together, as the maps read them.
        states = keys.new_empty(keys.shape[0], keys.shape[2], geometry.num_features(layer_idx))
        key_view, value_view = layer.split_heads(states)
        tables.remove(keys, layer_idx, out=key_view)
        value_view.copy_(values)
        features.append(states)
    return features


def _last_losses(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Losses `[batch, tokens]` from the logits of the last tokens; NaN before them and for each row's first token."""
    losses = torch.full(input_ids.shape, torch.nan)
    known = logits.shape[1] - 1
    if known:
        predicted = input_ids[:, -known:].to(logits.device)
        nats = token_losses(logits[:, :-1], predicted)
        has_context = mask[:, -known - 1 : -1].bool().cpu()
        losses[:, -known:] = nats.cpu().masked_fill(~has_context, torch.nan)
    return losses

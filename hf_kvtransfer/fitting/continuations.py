"""A text as both models read it, and places in it where the target goes on from a translation."""

import inspect
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..alignment import align_tokens
from ..alignment.spans import encode_with_spans
from ..compat import cache_argument, input_device, unwrap
from ..geometry import KVGeometry
from ..mapper import KVMapper
from ..native_states import AttentionInput
from ..rotary import Rotary, RotaryTables
from ..source import SourceKV


@dataclass(frozen=True, eq=False)
class ReadText:
    """
    What the maps are given of a text, and what they should lead the target to. Tokens are the target's.

    Args:
        input_ids (`torch.LongTensor`):
            `[tokens]`.
        starts (`torch.LongTensor`):
            `[continuations]`, ascending: the number of tokens before each continuation.
        source_kv (`SourceKV`):
            What the source read.
        source_index (`torch.LongTensor`, *optional*):
            `[1, tokens]`, the source token that speaks for each token; `None` if they are the same.
        token_features (`torch.Tensor`, *optional*):
            `[1, tokens, width]`, of each token, then of those before it.
        own (`tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]`):
            For each layer the target's own keys and values: of all tokens in native layers, else of the sinks,
            `[1, heads, tokens, head_dim]`.
        tables (`RotaryTables`):
            The target's rotary embedding at the tokens' positions.
        logits (`torch.Tensor`):
            `[continuations, length, vocabulary]`, what the target itself predicts after each token of them.
    """

    input_ids: torch.Tensor
    starts: torch.Tensor
    source_kv: SourceKV
    source_index: torch.Tensor | None
    token_features: torch.Tensor | None
    own: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    tables: RotaryTables
    logits: torch.Tensor


class Continuations:
    """
    Lets the target go on at several places of a text, on translations of what stands before them, and compares what it
    predicts with what it predicts on its own cache.

    Args:
        mapper (`KVMapper`):
            The maps. They may be trained between calls.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Their tokenizers, both `None` for texts that are token ids.
        length (`int`):
            Tokens of a continuation.
        count (`int`):
            Continuations of a text.
        token_ids (`Sequence[int]`, *optional*):
            The tokens among which the target predicts, all by default.
    """

    def __init__(
        self,
        mapper: KVMapper,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase | None,
        target_tokenizer: PreTrainedTokenizerBase | None,
        length: int,
        count: int,
        token_ids: Sequence[int] | None = None,
    ):
        self.mapper, self.source, self.target = mapper, source, target
        self.source_tokenizer, self.target_tokenizer = source_tokenizer, target_tokenizer
        self.length, self.count = length, count
        self.geometry = KVGeometry.from_model(target)
        self._head = nullcontext() if token_ids is None else OnlyTokens(target, token_ids)

    def places(self, num_tokens: int, seed: int, draw: int) -> torch.Tensor:
        """
        Where continuations begin: at even distances, with one random shift for all.

        Args:
            num_tokens (`int`):
                Tokens of the text.
            seed (`int`), draw (`int`):
                Of the shift: of all shifts, and which of them.

        Returns:
            `torch.LongTensor`: `[continuations]`, none if the text is too short for any.
        """
        sinks = self.mapper.config.sink_tokens
        room = num_tokens - self.length - sinks
        shift = random.Random(f"{seed} {draw}").random()
        starts = sinks + 1 + ((torch.arange(self.count) + shift) * room / self.count).long()
        return starts[starts + self.length <= num_tokens].unique() if room > 0 else starts[:0]

    @torch.no_grad()
    def read(self, text: Any, starts: torch.Tensor) -> ReadText:
        """
        Let both models read a text.

        Args:
            text (`str` or `torch.LongTensor`):
                The text, or its token ids `[tokens]`.
            starts (`torch.LongTensor`):
                As [`Continuations.places`] gives them.

        Raises:
            `AlignmentError`, `SourceCacheError`, `UnsupportedModelError`
        """
        config = self.mapper.config
        source_index = None
        if self.target_tokenizer is None:
            input_ids = torch.as_tensor(text)
            source_kv = SourceKV.prefill(self.source, None, input_ids, token_losses=False)
        else:
            source_kv = SourceKV.prefill(self.source, self.source_tokenizer, text, token_losses=False)
            ids, spans = encode_with_spans(self.target_tokenizer, text)
            input_ids = torch.tensor(ids)
            alignment = align_tokens(source_kv.text[0], source_kv.row_spans(0), text, spans)
            source_index = alignment.source_index[None]
        cache = DynamicCache()  # keeps every token also of sliding windows
        native_layers = config.native_layers
        attention_input = None if native_layers is None else AttentionInput(self.target, native_layers)
        steps = starts[:, None] + torch.arange(self.length)
        with attention_input or nullcontext(), self._head:
            logits = _logits(self.target, cache, input_ids[None], positions=steps.flatten())
        token_features = None
        if config.token_features and attention_input is not None:
            token_features = attention_input.hidden_states
        elif config.token_features:
            token_features = self.target.get_input_embeddings()(input_ids[None].to(input_device(self.target)))
        if token_features is not None:
            places = torch.arange(len(input_ids), device=token_features.device)
            before = [(places - distance).clamp(min=0) for distance in range(1 + config.previous_tokens)]
            token_features = torch.cat([token_features[:, index] for index in before], -1)
        own: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for layer_idx, layer in enumerate(self.geometry.layers):
            if layer is None:
                own.append(None)
                continue
            stock = cache.layers[layer_idx]
            is_native = native_layers is not None and layer_idx <= native_layers
            kept = len(input_ids) if is_native else config.sink_tokens
            own.append((stock.keys[:, :, :kept].clone(), stock.values[:, :, :kept].clone()))
        return ReadText(
            input_ids,
            starts,
            source_kv,
            source_index,
            token_features,
            tuple(own),
            Rotary.from_model(self.target).at(torch.arange(len(input_ids))[None]),
            logits.view(*steps.shape, -1),
        )

    def divergence(self, text: ReadText) -> torch.Tensor:
        """
        How far the target's predictions on a translation are from those on its own cache.

        Returns:
            `torch.Tensor`: The Kullback-Leibler divergence in nats, mean over the tokens of all continuations. Its
            gradient flows to the maps.
        """
        predicted, expected = (
            log_softmax(logits.flatten(0, 1).float(), -1) for logits in (self.predict(text), text.logits)
        )
        return kl_div(predicted, expected.to(predicted.device), reduction="batchmean", log_target=True)

    def predict(self, text: ReadText) -> torch.Tensor:
        """
        Let the target read the continuations, each on the translation of what stands before it.

        Returns:
            `torch.Tensor`: Its logits, as [`ReadText`]'s.
        """
        context = int(text.starts[-1])
        # Each continuation is a row, its context to the left of it and padding to the left of that.
        columns = torch.arange(context) - (context - text.starts)[:, None]
        index = columns.clamp(min=0)
        cache = DynamicCache()
        for layer_idx, layer in enumerate(self.geometry.layers):
            if layer is not None:
                states = self._keys_and_values(text, layer_idx, context)
                rows = (part[0][:, index.to(part.device)].transpose(0, 1) for part in states)
                cache.update(*rows, layer_idx)
        steps = text.starts[:, None] + torch.arange(self.length)
        mask = torch.cat([columns >= 0, torch.ones_like(steps, dtype=torch.bool)], 1).long()
        with self._head:
            return _logits(self.target, cache, text.input_ids[steps], attention_mask=mask, position_ids=steps)

    def _keys_and_values(self, text: ReadText, layer_idx: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first `stop` tokens, `[1, heads, tokens, head_dim]`, as in a `Translation`."""
        layer, own = self.geometry.layers[layer_idx], text.own[layer_idx]
        assert layer is not None and own is not None
        if own[0].shape[2] >= stop:
            return own[0][:, :, :stop], own[1][:, :, :stop]
        layer_map: Any = self.mapper.layers[layer_idx]
        first = own[0].shape[2]
        device, dtype = own[0].device, own[0].dtype
        index, tokens = None, slice(first, stop)
        if text.source_index is not None:
            index = text.source_index[:, first:stop]
            tokens = slice(int(index.min()), int(index.max()) + 1)
            index = (index - tokens.start).to(device)
        features = [text.source_kv.features[i][:, tokens].to(device, dtype) for i in layer_map.source_layers]
        token_features = None
        if text.token_features is not None:
            width = (1 + layer_map.previous_tokens) * self.mapper.config.token_features
            token_features = text.token_features[:, first:stop, :width].to(device, dtype)
        keys, values = layer.split_heads(layer_map(features, token_features, index))
        keys = text.tables.apply_with_grad(keys, layer_idx, first, stop)
        return torch.cat([own[0], keys], 2), torch.cat([own[1], values], 2)


def _logits(
    model: PreTrainedModel,
    cache: DynamicCache,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    **arguments: torch.Tensor,
) -> torch.Tensor:
    """Logits `[batch, tokens, vocabulary]`, of the tokens at `positions` or of all."""
    model = unwrap(model)
    device, parameters = input_device(model), inspect.signature(model.forward).parameters
    call: dict[str, Any] = {name: value.to(device) for name, value in arguments.items() if name in parameters}
    selects = positions is not None and "logits_to_keep" in parameters
    if selects:
        call["logits_to_keep"] = positions.to(device)
    call[cache_argument(model)] = cache
    logits = model(input_ids=input_ids.to(device), use_cache=True, **call).logits
    return logits if positions is None or selects else logits[:, positions.to(device)]


class OnlyTokens:
    """
    While it is entered, a model predicts a part of its vocabulary only: with 262,144 tokens in it the output head is
    most of a step's work, for tokens that the texts never have.

    Args:
        model (`PreTrainedModel`):
            A model. One whose output head is no plain `nn.Linear` is left as it is.
        token_ids (`Sequence[int]`):
            The tokens.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Sequence[int]):
        self._model, self._head = unwrap(model), unwrap(model).get_output_embeddings()
        self._part = None
        if type(self._head) is nn.Linear and self._head.weight.device.type != "meta":
            index = torch.as_tensor(token_ids, device=self._head.weight.device)
            with torch.device("meta"):
                self._part = nn.Linear(self._head.in_features, len(index), self._head.bias is not None)
            for name, parameter in self._head.named_parameters():
                setattr(self._part, name, nn.Parameter(parameter.detach()[index], requires_grad=False))

    def __enter__(self) -> "OnlyTokens":
        if self._part is not None:
            self._model.set_output_embeddings(self._part)
        return self

    def __exit__(self, *exception) -> None:
        if self._part is not None:
            self._model.set_output_embeddings(self._head)

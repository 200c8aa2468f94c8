"""A cache that knows which tokens it stands for, and does not let `generate` misread it silently."""

import copy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .compat import cache_argument
from .errors import BatchMismatchError, KVTransferError, PrefixMismatchError, RefusedError
from .layers import PendingLayer
from .padding import check_same_shape
from .prompt_prefix import match_prefix


class _HeldTokens(int):
    """
    The number of tokens that a cache holds, for `generate`.

    It reads what is left when it is subtracted from the prompt's length, and does not look whether anything is: with
    nothing left it reads the whole prompt again, and beyond that an arbitrary part of it.
    """

    def __rsub__(self, tokens: int) -> int:
        left = tokens - int(self)
        if left <= 0:
            raise PrefixMismatchError(
                f"`generate` was given {tokens} tokens and a cache that stands for {int(self)}: none is left to read. "
                "Pass the whole prompt, longer than the cache, or new tokens with an `attention_mask` of all tokens, "
                "the cached ones included. `cache.prepare(inputs)` cuts the cache to what the prompt needs."
            )
        return left


class GuardedCache(DynamicCache):
    """
    Guards a cache that holds tokens before `generate` begins.

    Args:
        target (`PreTrainedModel`):
            The model that will use it.
    """

    # True in `hf_kvtransfer.generate`, which feeds only what the cache does not hold.
    is_read_once = False
    _is_given = False
    _is_entering = False
    _abandoned_tokens = 0

    def __init__(self, target: PreTrainedModel):
        super().__init__(config=target.config)
        self._argument = cache_argument(target)
        self._cache_implementation = getattr(target.generation_config, "cache_implementation", None)
        self._forget()

    def _forget(self) -> None:
        """Stand for no tokens."""
        self.input_ids = torch.empty(0, 0, dtype=torch.long)
        self.attention_mask = self.input_ids

    def _give_up(self, error: KVTransferError) -> None:
        """Empty the cache, so that the whole prompt is read, or raise."""
        raise error

    def _keep(self, columns: int, difference: str | None) -> None:
        """Hold only the first tokens of each row, or none if that is not possible; say why if the prompt differs."""
        held = int(self.get_seq_length())
        try:
            self.crop(columns - held)
        except (RuntimeError, IndexError, NotImplementedError) as error:  # a window has dropped what came before
            self.reset()  # some layers may have been cut
            self._give_up(
                PrefixMismatchError(
                    f"The cache of {held} tokens cannot be cut to the {columns} that the prompt has in common with "
                    f"it: {error} Make a new cache for this prompt."
                )
            )

    @property
    def num_rows(self) -> int:
        """Rows that the cache holds, 0 if it is empty."""
        for layer in self.layers:
            if isinstance(layer, PendingLayer):
                return len(layer.pending.rows)
            if getattr(layer, "keys", None) is not None:
                return len(layer.keys)
        return 0

    @property
    def _is_user_defined(self) -> bool:
        return self._is_given

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` says so of a cache that it was given, right before the prefill.
        self._is_given = self._is_entering = value

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        length = super().get_seq_length(layer_idx or 0)
        # The prefill asks about no layer in particular, what builds masks about one.
        return _HeldTokens(length) if self._is_entering and layer_idx is None and length else length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = int(self.get_seq_length())
        self.input_ids, self.attention_mask = self.input_ids[:, :length], self.attention_mask[:, :length]

    def activate_past_recording(self) -> None:
        # `generate` asks for it before its prefill in assisted decoding only, which feeds the whole prompt.
        if self._is_entering and not self.is_read_once and (held := int(self.get_seq_length())):
            self._give_up(
                RefusedError(
                    "Assisted and prompt-lookup decoding in transformers read the whole prompt on top of a cache that "
                    "holds its beginning. Call `hf_kvtransfer.generate`, which continues from the cache."
                )
            )
            self._abandoned_tokens = held
        super().activate_past_recording()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._is_entering:
            self._is_entering = False
            abandoned, self._abandoned_tokens = self._abandoned_tokens, 0
            if key_states.shape[-2] <= abandoned:
                raise PrefixMismatchError(
                    f"Assisted decoding was given {key_states.shape[-2]} new tokens and a cache that stood for "
                    f"{abandoned}, which it cannot continue from. Pass the whole prompt, or use "
                    "`hf_kvtransfer.generate`."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __deepcopy__(self, memo) -> "GuardedCache":
        # Not by way of `__getstate__`: copies stay pending, and share what they are translated from.
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin

    def note_sequences(self, sequences: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        """
        Note what was read and generated, so that the next prompt can be checked against it.

        Args:
            sequences (`torch.LongTensor`):
                What `generate` returned, `[batch, tokens]`, the prompt included.
            attention_mask (`torch.LongTensor`, *optional*):
                Of the prompt, by default that of the tokens known so far.

        Raises:
            `PrefixMismatchError`: they are fewer tokens than the cache holds, or of another prompt.
            `BatchMismatchError`: the cache holds another number of rows, as after a beam search.
        """
        length, rows = int(self.get_seq_length()), self.num_rows
        if rows != len(sequences):
            raise BatchMismatchError(
                f"`sequences` has {len(sequences)} rows, the cache {rows}: a beam search leaves one row for each of "
                "its beams. Make a new cache for the next prompt."
            )
        if sequences.shape[1] < length:
            raise PrefixMismatchError(
                f"`sequences` has {sequences.shape[1]} tokens, the cache stands for {length}. Pass what `generate` "
                "returned, the prompt included."
            )
        mask = torch.ones(sequences.shape, dtype=torch.long)
        known = self.attention_mask if attention_mask is None else attention_mask
        if known.numel():
            mask[:, : known.shape[1]] = known[:, : mask.shape[1]]
        if self.input_ids.numel():
            match = match_prefix(sequences, mask, self.input_ids, self.attention_mask)
            if match.difference is not None:
                raise PrefixMismatchError(f"`sequences` is not what the cache has read: {match.difference}.")
        self.input_ids, self.attention_mask = sequences[:, :length].cpu(), mask[:, :length]

    def prepare(self, inputs: dict[str, torch.Tensor], sequences: torch.Tensor | None = None) -> dict[str, Any]:
        """
        Check a prompt against what the cache stands for, and cut the cache to what they have in common.

        What can be compared is kept as far as it is equal, but for the prompt's last token, which `generate` has to
        read: a prompt that diverges, ends earlier or was tokenized otherwise is read from there on. If nothing of the
        translation is left, the cache is emptied, or it is an error, as `on_refusal` says.

        Args:
            inputs (`dict[str, torch.Tensor]`):
                What the target's tokenizer returned for the whole prompt, left-padded: `input_ids` and
                `attention_mask`, `[batch, tokens]`. Or new tokens only with the `attention_mask` of all tokens; or
                `inputs_embeds` of the whole prompt, of which only the number can be checked.
            sequences (`torch.LongTensor`, *optional*):
                What `generate` returned, `[batch, tokens]`, if it has used the cache before: it tells which tokens
                were read since. [`generate`] notes it itself.

        Returns:
            `dict`: Arguments for `generate`: the cache, `use_cache=True`, and `cache_implementation=None` for a
            checkpoint whose generation config asks for another kind of cache, with which `generate` takes none.

        Raises:
            `PrefixMismatchError`: tokens were read that are not known; or, with `on_refusal="raise"`, the prompt does
                not start with anything that was translated.
            `BatchMismatchError`: it has another number of rows, or a mask of another shape.
        """
        # Without it each step would read everything again, on top of the cache.
        arguments = {**inputs, self._argument: self, "use_cache": True}
        if self._cache_implementation is not None:
            arguments["cache_implementation"] = None
        prompt: Any = inputs.get("input_ids")
        is_text = prompt is not None
        prompt = torch.as_tensor(prompt if is_text else inputs["inputs_embeds"])
        tokens, length = prompt.shape[1], int(self.get_seq_length())
        mask: Any = inputs.get("attention_mask")
        if sequences is not None:
            self.note_sequences(sequences)
        if mask is None:
            # `generate` would take any token that is the padding token's for padding, also one that was generated.
            mask = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device)
            if is_text and self.attention_mask.numel() and len(prompt) == len(self.attention_mask):
                known = self.attention_mask[:, : min(length, tokens)]
                mask[:, : known.shape[1]] = known.to(mask.device)
                arguments["attention_mask"] = mask
        mask = torch.as_tensor(mask)
        is_new_only = is_text and length > 0 and mask.shape[1] == length + tokens
        if is_text and not is_new_only:
            check_same_shape("attention_mask", mask, prompt)
        if not length:
            return arguments
        if length > self.input_ids.shape[1]:
            raise PrefixMismatchError(
                f"The cache stands for {length} tokens, of which {self.input_ids.shape[1]} are known: it was used "
                "since it was made. Pass what `generate` returned as `sequences`, or call `hf_kvtransfer.generate`, "
                "which notes it."
            )
        known_ids, known_mask = self.input_ids, self.attention_mask
        if len(prompt) != len(known_ids):
            raise BatchMismatchError(
                f"The prompt has {len(prompt)} rows, the translated cache {len(known_ids)}. Pass one prompt for each "
                "row that the source has read."
            )
        if is_new_only:
            if (mask[:, :length].cpu().bool() != known_mask.bool()).any():
                raise PrefixMismatchError(
                    "`attention_mask` pads other tokens than those that the translated cache stands for: with new "
                    "tokens only, it must begin with `cache.attention_mask`."
                )
            return arguments
        columns, difference = min(length, tokens), None
        if is_text:
            match = match_prefix(prompt, mask, known_ids, known_mask)
            columns, difference = match.columns, match.difference
        if min(columns, tokens - 1) < length:
            self._keep(min(columns, tokens - 1), difference)
        return arguments

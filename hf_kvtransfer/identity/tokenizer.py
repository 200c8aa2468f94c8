"""Fingerprints: is this the tokenizer that a mapper was fitted with?"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..errors import TokenizerMismatchError
from .one_look import looked_at_once


if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


# What decides which ids a text becomes. The rest of a tokenizer (truncation, padding, post-processor, decoder, chat
# template) can differ, for instance in whether a BOS is put in front, without any id meaning something else.
_IDENTITY_MEMBERS = ("added_tokens", "normalizer", "pre_tokenizer", "model")

_fingerprints: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple, str]] = WeakKeyDictionary()


@looked_at_once
def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Says whether two tokenizers turn the same text into the same ids, whatever files they were loaded from.

    The vocabulary with its merges or scores, the normalizer, the pre-tokenizer and the added tokens count. The BOS
    policy, truncation, padding, decoder and chat template do not.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer, one that holds a `tokenizers.Tokenizer`.

    Returns:
        `str`: 32 hexadecimal digits.

    Raises:
        TokenizerMismatchError: The tokenizer is not a fast one, or contains components written in Python, which
            cannot be compared.
    """
    backend = _backend(tokenizer)
    # Reading the whole vocabulary takes half a second for 262k tokens, too long for each handoff.
    components = _component_state(backend.normalizer), _component_state(backend.pre_tokenizer)
    size = backend.get_vocab_size(with_added_tokens=False)
    state = (size, backend.get_added_tokens_decoder(), *components)
    cached = _fingerprints.get(tokenizer)
    if cached is not None and cached[0] == state:
        return cached[1]
    try:
        serialized = backend.to_str()
    except Exception as error:  # `tokenizers` raises a bare Exception for components written in Python
        raise _not_comparable(tokenizer, error) from error
    fingerprint = _fingerprint(serialized)
    _fingerprints[tokenizer] = (state, fingerprint)
    return fingerprint


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise TokenizerMismatchError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so its vocabulary and rules cannot be compared with "
            "those that a mapper was fitted with. Load the tokenizer with `AutoTokenizer.from_pretrained(...)` from a "
            "folder that holds a `tokenizer.json`, or convert it once and save it with `save_pretrained`."
        )
    return backend


def _component_state(component) -> bytes | None:
    """The settings of a normalizer or pre-tokenizer, which can be exchanged in place; None where there is none."""
    if component is None:
        return None
    try:
        return bytes(component.__getstate__())
    except Exception:  # written in Python: `to_str` will refuse it too, and say so
        return None


def _not_comparable(tokenizer: PreTrainedTokenizerBase, error: Exception) -> TokenizerMismatchError:
    return TokenizerMismatchError(
        f"{type(tokenizer).__name__} cannot be written out for a comparison ({error}). Its normalizer and "
        "pre-tokenizer must be components of the `tokenizers` library and not Python objects."
    )


def _fingerprint(serialized: str) -> str:
    """
    Hashes the identity members of a serialised `tokenizers.Tokenizer`.

    The model holds nearly all of the text and `tokenizers` writes it in one way only (compact, vocabulary by id,
    merges by rank), so that its text is hashed as it is: to parse and dump it again takes several seconds.
    """
    decoder = json.JSONDecoder()
    digests = {}
    position = 1
    while serialized[position] != "}":
        key, position = decoder.raw_decode(serialized, position)
        position += 1
        if key == "model" and serialized.endswith("}}"):
            # `tokenizers` writes the model last.
            text, position = serialized[position:-1], len(serialized) - 1
        else:
            value, position = decoder.raw_decode(serialized, position)
            if key == "added_tokens":
                value = sorted(value, key=lambda token: token["id"])
            text = json.dumps(value, sort_keys=True)
        digests[key] = hashlib.sha256(text.encode()).hexdigest()
        position += serialized[position] == ","
    identity = [(key, digests.get(key)) for key in _IDENTITY_MEMBERS]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

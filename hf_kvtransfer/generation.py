"""`generate` for a translated cache: the prompt is checked, and what is in the cache is never read twice."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from .cache import TranslatedCache
from .compat import unwrap


def generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: TranslatedCache, **options) -> Any:
    """
    As `target.generate(**cache.prepare(inputs), **options)`, and three things more.

    - Assisted and prompt-lookup decoding continue from the cache. In transformers itself they feed the whole prompt on
      top of any cache that they are given.
    - The tokens that are read and generated are noted, so that the next prompt on this cache can be checked, too.
    - `prefill_chunk_size` is refused before transformers 5.22, where it is wrong with any cache that holds tokens.

    Args:
        target (`PreTrainedModel`):
            The model that the cache was made for.
        inputs (`dict[str, torch.Tensor]`):
            What the target's tokenizer returned for the whole prompt: `input_ids` and `attention_mask`,
            `[batch, tokens]`, left-padded.
        cache ([`TranslatedCache`]):
            Is filled by the call.
        options:
            For [`~transformers.GenerationMixin.generate`].

    Returns:
        What `generate` returns.

    Raises:
        `ValueError`: `use_cache=False`, or `prefill_chunk_size` with a transformers that cannot.
        `PrefixMismatchError`, `BatchMismatchError`: see [`TranslatedCache.prepare`].

    Example:

    ```python
    >>> output = hf_kvtransfer.generate(target, inputs, cache, assistant_model=small, max_new_tokens=32)
    ```
    """
    _check_options(target, options)
    arguments = cache.prepare(inputs)
    prompt, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    is_whole = prompt is not None and (mask is None or mask.shape == prompt.shape)
    model, known = unwrap(target), cache.input_ids
    # A shallow copy has the same weights; the target itself, which others may be using, is left as it is.
    reader = copy.copy(model)
    if is_whole:
        reader.prepare_inputs_for_generation = _reading_once(model, cache, prompt.shape[1])
        cache.is_read_once = True
    try:
        output = reader.generate(**arguments, **options)
    finally:
        cache.is_read_once = False
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    # A beam search leaves rows that no sequence tells about, embeddings tokens that have no ids.
    if prompt is not None and len(sequences) == len(prompt) == cache.num_rows:
        if not is_whole:
            sequences = torch.cat([known, sequences.cpu()], dim=1)
        cache.note_sequences(sequences, torch.ones_like(prompt) if mask is None else mask)
    return output


def _reading_once(model: PreTrainedModel, cache: TranslatedCache, prompt_length: int) -> Callable:
    """`prepare_inputs_for_generation` that leaves out what is in the cache also where `generate` does not."""

    def prepare_inputs_for_generation(input_ids, next_sequence_length=None, is_first_iteration=False, **kwargs):
        # Chunks of a prefill are shorter: they have been cut already.
        if is_first_iteration and next_sequence_length is None and input_ids.shape[1] >= prompt_length:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )

    return prepare_inputs_for_generation


def _check_options(target: PreTrainedModel, options: dict[str, Any]) -> None:
    if not options.pop("use_cache", True):
        raise ValueError("`use_cache` is False: each step would read the whole text again. Leave it out.")
    config = options.get("generation_config") or target.generation_config
    size = options.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    if size is not None and Version(transformers.__version__) < Version("5.22"):
        raise ValueError(
            f"`prefill_chunk_size` is {size}, but transformers {transformers.__version__} reads the whole prompt in "
            "chunks on top of a cache that holds its beginning. Use transformers 5.22 or newer, or leave it out."
        )

"""
What limits a mapper: the gap recovered when parts of the translated cache are the target's own.

    python benchmarks/what_limits.py DATA --mapper FOLDER --source gemma-3-270m --target smollm2-135m-instruct

Contexts must be no longer than the target's windows.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from pairs.made_models import GEMMA, SMOLLM2, demo
from pairs.measuring import CONTINUATION, Pair, held_out_rows, make_parser, parse, print_table, ready, share
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer.alignment import align_tokens
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import filled_cache
from hf_kvtransfer.fidelity.data import Passage, load_evaluation_data
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.scoring import compare, read_continuations
from hf_kvtransfer.fidelity.statistics import shares_of_first


GROUPS = 5  # of neighbouring layers
END = 32  # first or last tokens


@dataclasses.dataclass
class Part:
    """What is the target's own: the `"keys"` or `"values"` of some layers and some tokens, a mask `[tokens]`."""

    name: str
    layers: Sequence[int]
    states: Sequence[str]
    tokens: torch.Tensor


def exact(pair: Pair, text: str, length: int) -> torch.Tensor:
    """Which of the first tokens end where a token of the source ends."""
    spans = [encode_with_spans(tokenizer, text)[1] for tokenizer in pair.tokenizers.values()]
    return align_tokens(text, spans[0], text, spans[1]).exact[:length]


def parts(pair: Pair, text: str, num_layers: int, length: int, keys_of: list[int]) -> Iterator[Part]:
    """All, nothing, and parts of all kinds, or with `keys_of` the keys of these layers, each alone and together."""
    layers, both = range(num_layers), ("keys", "values")
    everywhere, places = torch.ones(length, dtype=torch.bool), torch.arange(length)
    yield Part("all", layers, both, everywhere)
    yield Part("nothing", [], [], ~everywhere)
    if keys_of:
        for layer_idx in keys_of:
            yield Part(f"keys of layer {layer_idx}", [layer_idx], ["keys"], everywhere)
        yield Part(f"keys of layers {', '.join(map(str, keys_of))}", keys_of, ["keys"], everywhere)
        return
    for states in both:
        yield Part(states, layers, [states], everywhere)
    bounds = [num_layers * i // GROUPS for i in range(GROUPS + 1)]
    for start, end in itertools.pairwise(bounds):
        yield Part(f"layers {start} to {end - 1}", layers[start:end], both, everywhere)
    yield Part("tokens that end inside the source's", layers, both, ~exact(pair, text, length))
    yield Part(f"first {END} tokens", layers, both, places < END)
    yield Part(f"last {END} tokens", layers, both, places >= length - END)


def mixed(translated: DynamicCache, native: DynamicCache, part: Part) -> DynamicCache:
    """A copy of a translated cache, in part the native one."""
    cache = copy.deepcopy(translated)
    for layer_idx in part.layers:
        for name in part.states:
            states, own = (getattr(other.layers[layer_idx], name) for other in (cache, native))
            states[..., part.tokens, :] = own[..., part.tokens, :]
    return cache


def gained(
    replay: Replay, pair: Pair, passage: Passage, keys_of: list[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each cache what it gains over no context, in nats, and which share of the tokens is the target's own."""
    ids, target = passage.target_ids, pair.target
    translation = replay.translate(passage, replay.read_source(passage))
    native = filled_cache(target, torch.tensor([ids[:-1]]))
    translated = DynamicCache(config=target.config)
    for layer_idx in range(len(translated.layers)):
        states = translation.layer(layer_idx, 0, translation.length, *translation.default_placement)
        translated.update(*states, layer_idx)

    def loss(cache: DynamicCache) -> float:
        reading = read_continuations(target, cache, passage, ids[-1:])
        return compare("native", reading, reading, passage).loss

    floor = loss(filled_cache(target, torch.tensor([ids[: translation.num_sinks]])))
    gains, shares = {}, {}
    for part in parts(pair, passage.source_text, len(native.layers), translation.length, keys_of):
        gains[part.name] = floor - loss(mixed(translated, native, part))
        shares[part.name] = part.tokens.float().mean().item()
    return gains, shares


def main():
    parser = make_parser(__doc__, documents=40)
    parser.add_argument("--mapper", type=Path, required=True)
    parser.add_argument("--source", choices=(SMOLLM2, GEMMA), default=SMOLLM2)
    parser.add_argument("--target", choices=(SMOLLM2, GEMMA), default=GEMMA)
    parser.add_argument("--keys-of", type=int, nargs="+", default=[], metavar="LAYER", help="only these layers' keys")
    parser.set_defaults(contexts=[256])
    arguments, rows, held_out, _ = parse(parser)
    pair = Pair.load(demo(arguments.source), demo(arguments.target), rows)
    mapper = ready(KVMapper.from_pretrained(arguments.mapper), pair)
    replay = Replay(mapper, *pair.models, **pair.tokenizers)
    shown = []
    for context in arguments.contexts:
        lengths = {"context_tokens": context, "continuation_tokens": CONTINUATION, "limit": arguments.documents}
        documents = held_out_rows(held_out, pair.target_tokenizer, context)
        passages = load_evaluation_data(documents, *pair.tokenizers.values(), **lengths).documents
        gains, shares = zip(
            *(gained(replay, pair, d.passages[0], arguments.keys_of) for d in tqdm(passages, unit="document")),
            strict=True,
        )
        gaps = shares_of_first(np.array([list(gain.values()) for gain in gains]))
        if gaps is None:
            parser.error(f"in {len(passages)} documents the context does not clearly help: give more of them.")
        for name, gap in zip(gains[0], gaps, strict=True):
            tokens = np.mean([of_document[name] for of_document in shares])
            shown.append([name, f"{context:,}", f"{tokens:.2f}", share(gap)])
    title = f"{arguments.source} to {arguments.target}, {arguments.mapper.name}, {len(passages)} documents"
    print_table(title, ("the target's own", "context", "share of tokens", "gap recovered"), shown)


if __name__ == "__main__":
    main()

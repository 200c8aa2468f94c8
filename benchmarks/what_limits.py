"""
What limits a mapper: the gap recovered when parts of the translated cache are the target's own.

    python benchmarks/what_limits.py DATA --mapper FOLDER --source gemma-3-270m --target smollm2-135m-instruct

Contexts must be no longer than the target's windows.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pairs.made_models import GEMMA, SMOLLM2, demo
from pairs.measuring import CONTINUATION, Pair, held_out_rows, make_parser, parse, print_table, ready, share
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_kvtransfer import KVMapper
from hf_kvtransfer.alignment.spans import encode_with_spans
from hf_kvtransfer.compat import read_into_cache
from hf_kvtransfer.fidelity.data import Passage, load_evaluation_data
from hf_kvtransfer.fidelity.replay import Replay
from hf_kvtransfer.fidelity.scoring import compare, read_continuations
from hf_kvtransfer.fidelity.statistics import resampled_totals, share_intervals
from hf_kvtransfer.layers import install


GROUPS = 5  # of neighbouring layers
END = 32  # first or last tokens


def inside_source_tokens(pair: Pair, passage: Passage, length: int) -> torch.Tensor:
    """Which of the first tokens end where no token of the source ends."""
    _, source_spans = encode_with_spans(pair.source_tokenizer, passage.source_text)
    ids, spans = encode_with_spans(pair.target_tokenizer, passage.source_text)
    if ids[:length] != passage.target_ids[:length]:
        raise ValueError("The target's tokens are not those of the source's text: give plain text.")
    ends = {end for _, end in source_spans}
    return torch.tensor([end not in ends for _, end in spans[:length]])


def parts(
    pair: Pair, passage: Passage, cache: DynamicCache, keys_of: list[int]
) -> Iterator[tuple[str, set[int], str, torch.Tensor]]:
    """
    Names of parts, with the layers, the states (`k`, `v`) and the tokens that they are: all kinds of parts, or with
    `keys_of` the keys of these layers, each alone and together.
    """
    layers, length = range(len(cache.layers)), cache.get_seq_length()
    everywhere, places = torch.ones(length, dtype=torch.bool), torch.arange(length)
    yield "nothing", set(), "", everywhere
    if keys_of:
        for layer_idx in keys_of:
            yield f"keys of layer {layer_idx}", {layer_idx}, "k", everywhere
        yield f"keys of layers {', '.join(map(str, keys_of))}", set(keys_of), "k", everywhere
        return
    yield "keys", set(layers), "k", everywhere
    yield "values", set(layers), "v", everywhere
    bounds = [len(layers) * i // GROUPS for i in range(GROUPS + 1)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        yield f"layers {start} to {end - 1}", set(layers[start:end]), "kv", everywhere
    yield "tokens that end inside the source's", set(layers), "kv", inside_source_tokens(pair, passage, length)
    yield f"first {END} tokens", set(layers), "kv", places < END
    yield f"last {END} tokens", set(layers), "kv", places >= length - END


def mixed(
    translated: DynamicCache, native: DynamicCache, layers: set[int], states: str, tokens: torch.Tensor
) -> DynamicCache:
    """A translated cache with a part of the native one, in place."""
    for layer_idx in layers:
        own, other = translated.layers[layer_idx], native.layers[layer_idx]
        for name in (name for name in ("keys", "values") if name[0] in states):
            getattr(own, name)[..., tokens, :] = getattr(other, name)[..., tokens, :]
    return translated


def gained(
    replay: Replay, pair: Pair, passage: Passage, keys_of: list[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each cache what it gains over no context, in nats, and which share of the tokens is the target's own."""
    ids, target = passage.target_ids, pair.target
    translation = replay.translate(passage, replay.read_source(passage))

    def loss(cache: DynamicCache) -> float:
        reading = read_continuations(target, cache, passage, ids[-1:])
        return compare("native", reading, reading, passage).loss

    own = own_cache(target, ids[:-1])
    losses, shares = {"all": loss(own_cache(target, ids[:-1]))}, {"all": 1.0}
    for name, layers, states, tokens in parts(pair, passage, own, keys_of):
        cache = install(DynamicCache(config=target.config), translation)
        losses[name] = loss(mixed(cache, own, layers, states, tokens))
        shares[name] = tokens.float().mean().item() if layers else 0.0
    floor = loss(own_cache(target, ids[: translation.num_sinks]))
    return {name: floor - loss for name, loss in losses.items()}, shares


def own_cache(target: PreTrainedModel, ids: list[int]) -> DynamicCache:
    """What the target has read itself."""
    cache = DynamicCache(config=target.config)
    read_into_cache(target, cache, torch.tensor([ids]))
    return cache


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
        totals = np.array([list(gain.values()) for gain in gains])
        bounds = share_intervals(resampled_totals(totals))
        if bounds is None:
            parser.error(f"in {len(passages)} documents the context does not clearly help: give more of them.")
        for name, total, low, high in zip(gains[0], totals.sum(0), *bounds, strict=True):
            gap = {"value": total / totals[:, 0].sum(), "low": low, "high": high}
            tokens = np.mean([of_document[name] for of_document in shares])
            shown.append([name, f"{context:,}", f"{tokens:.2f}", share(gap)])
    title = f"{arguments.source} to {arguments.target}, {arguments.mapper.name}, {len(passages)} documents"
    print_table(title, ("the target's own", "context", "share of tokens", "gap recovered"), shown)


if __name__ == "__main__":
    main()

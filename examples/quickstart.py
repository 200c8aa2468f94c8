"""
SmolLM2-135M-Instruct reads a story, Gemma-3-270M ends it: from a translated cache, after its own prefill, and after
no context at all.

    make demo
"""

import time
from pathlib import Path

import torch
from transformers import DynamicCache, set_seed

from hf_kvtransfer import KVMapper, SourceKV, TranslatedCache
from hf_kvtransfer.compat import cache_argument
from hf_kvtransfer.demo_models import load_demo_model


HERE = Path(__file__).parent
MAPPER = HERE.parent / "mappers" / "smollm2-135m-instruct--gemma-3-270m"
NEW_TOKENS = 32


def continuation_loss(model, input_ids, cache, known):
    """Mean loss in nats per token of the last `known` tokens, given a cache of some tokens that stand before them."""
    with torch.no_grad():
        new_ids = input_ids[:, cache.get_seq_length() :]
        logits = model(new_ids, logits_to_keep=known + 1, **{cache_argument(model): cache}).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), input_ids[0, -known:]).item()


def main():
    set_seed(0)
    source, source_tokenizer = load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(MAPPER, dtype=target.dtype)

    context, ending = (HERE / "harbour.txt").read_text(encoding="utf-8").rsplit("\n\n", 1)
    context += "\n\n"
    print(f"\nSmolLM2 reads {len(source_tokenizer(context).input_ids)} tokens: {context[:60]!r} ... {context[-60:]!r}")
    source_kv = SourceKV.prefill(source, source_tokenizer, context)

    inputs = target_tokenizer(context, return_tensors="pt")
    whole = target_tokenizer(context + ending, return_tensors="pt").input_ids
    known = whole.shape[1] - inputs.input_ids.shape[1]
    first_tokens = inputs.input_ids[:, : mapper.config.sink_tokens]

    def translated():
        return TranslatedCache(source_kv, mapper, target, target_tokenizer=target_tokenizer)

    def native():
        return DynamicCache(config=target.config)

    print(translated().report, "\n")
    # No context: the ending after the first tokens of the story only.
    ending_alone = torch.cat([first_tokens, whole[:, -known - 1 :]], dim=1)
    arms = {
        "Gemma on SmolLM2's cache, translated": (translated, inputs.input_ids, whole),
        "Gemma after its own prefill": (native, inputs.input_ids, whole),
        "Gemma without the context": (native, ending_alone[:, :-known], ending_alone),
    }
    target.generate(first_tokens, max_new_tokens=2, do_sample=False)  # warm up
    for name, (make_cache, prompt, prompt_and_ending) in arms.items():
        start = time.perf_counter()
        cache = {cache_argument(target): make_cache()}
        output = target.generate(prompt, max_new_tokens=1, do_sample=False, **cache)
        first_token = time.perf_counter() - start
        output = target.generate(output, max_new_tokens=NEW_TOKENS - 1, do_sample=False, **cache)
        loss = continuation_loss(target, prompt_and_ending, make_cache(), known)
        print(f"{name}: first token after {first_token:.2f} s, loss on the story's real ending {loss:.2f} nats/token")
        print(f"    {target_tokenizer.decode(output[0, prompt.shape[1] :])!r}\n")


if __name__ == "__main__":
    main()

"""
A target in 4 bits (bitsandbytes), with a mapper that was measured on the target as it was before.

    pip install bitsandbytes
    python examples/four_bit_target.py SOURCE TARGET MAPPER context.txt "What happened then?"
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_kvtransfer import FidelityGate, SourceKV, TranslatedCache, generate


# Weights in 4 bits cannot be compared with those that were measured, so the gate refuses them. This use accepts them
# unseen; to know what the rounding costs, measure the mapper on the 4-bit target itself (evaluate_and_gate.py).
GATE = FidelityGate(allow_unverified=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("mapper")
    parser.add_argument("context", help="text file")
    parser.add_argument("question")
    arguments = parser.parse_args()

    source = AutoModelForCausalLM.from_pretrained(arguments.source, dtype="auto")
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target,
        dtype="auto",
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    source_tokenizer, target_tokenizer = map(AutoTokenizer.from_pretrained, (arguments.source, arguments.target))
    print(f"{target.get_memory_footprint() / 1e6:.1f} MB of weights")

    with open(arguments.context, encoding="utf-8") as file:
        context = file.read()
    source_kv = SourceKV.prefill(source, source_tokenizer, context)
    cache = TranslatedCache(source_kv, arguments.mapper, target, target_tokenizer=target_tokenizer, gate=GATE)
    print(cache.report)
    inputs = target_tokenizer(context + arguments.question, return_tensors="pt").to(target.device)
    output = generate(target, inputs, cache, max_new_tokens=64)
    print(target_tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()

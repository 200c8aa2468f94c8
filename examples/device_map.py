"""
A target that does not fit on one device: spread by `device_map`, with what is left over on disk.

    python examples/device_map.py SOURCE TARGET MAPPER context.txt "What happened then?" --max-memory 0=20GiB cpu=40GiB

Nothing is to be done for the cache: each layer's keys and values are made where that layer runs.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import SourceKV, TranslatedCache, generate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("mapper")
    parser.add_argument("context", help="text file")
    parser.add_argument("question")
    parser.add_argument("--max-memory", nargs="+", metavar="DEVICE=SIZE", help="as accelerate takes it")
    parser.add_argument("--offload-folder", default="offload")
    arguments = parser.parse_args()

    limits = [entry.split("=", 1) for entry in arguments.max_memory or []]
    source = AutoModelForCausalLM.from_pretrained(arguments.source, dtype="auto")
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target,
        dtype="auto",
        device_map="auto",
        max_memory={int(device) if device.isdigit() else device: size for device, size in limits} or None,
        offload_folder=arguments.offload_folder,
    )
    source_tokenizer, target_tokenizer = map(AutoTokenizer.from_pretrained, (arguments.source, arguments.target))
    for part, device in target.hf_device_map.items():
        print(f"{part or 'all of it'}: {device}")

    with open(arguments.context, encoding="utf-8") as file:
        context = file.read()
    source_kv = SourceKV.prefill(source, source_tokenizer, context)
    cache = TranslatedCache(source_kv, arguments.mapper, target, target_tokenizer=target_tokenizer)
    print(cache.report)
    inputs = target_tokenizer(context + arguments.question, return_tensors="pt").to(target.device)
    output = generate(target, inputs, cache, max_new_tokens=64)
    print(target_tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("keys are on", {str(layer.keys.device) for layer in cache.layers})


if __name__ == "__main__":
    main()

"""
Fit a mapper from one model's cache to another's, on text of your own.

    python examples/fit.py SOURCE TARGET calibration.jsonl my-mapper

SOURCE and TARGET are folders or Hub ids. The text is JSON Lines with a `text` field in each row, or plain text.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import fit_mapper


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("texts")
    parser.add_argument("mapper", help="folder that the mapper is written to")
    parser.add_argument("--budget", help="what it may take, such as 45MB")
    arguments = parser.parse_args()

    mapper = fit_mapper(
        AutoModelForCausalLM.from_pretrained(arguments.source, dtype="auto"),
        AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto"),
        arguments.texts,
        source_tokenizer=AutoTokenizer.from_pretrained(arguments.source),
        target_tokenizer=AutoTokenizer.from_pretrained(arguments.target),
        budget=arguments.budget,
        checkpoint=f"{arguments.mapper}.partial",  # an interrupted fit goes on from there
    )
    for layer_idx in mapper.config.mapped_layers:
        reads = mapper.config.layers[layer_idx]["source_layers"]
        keys, values = mapper.config.fit["layers"][layer_idx]["explained_variance"]
        print(f"layer {layer_idx} reads {reads}, and explains {keys:.3f} of held-out keys, {values:.3f} of values")
    mapper.save_pretrained(arguments.mapper)
    print(f"{mapper.num_bytes() / 1e6:.1f} MB in {arguments.mapper}. Next: examples/evaluate_and_gate.py")


if __name__ == "__main__":
    main()

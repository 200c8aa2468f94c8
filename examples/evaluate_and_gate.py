"""
Measure a mapper on text that it was not fitted on, and ask whether a use that needs some of it may rely on it.

    python examples/evaluate_and_gate.py SOURCE TARGET my-mapper prose=held_out.jsonl code=our_code.jsonl --need prose

Exits with 1 if the gate refuses. SOURCE and TARGET are folders or Hub ids.
"""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import FidelityGate, KVMapper, evaluate_mapper


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("mapper", help="its folder, which fidelity.json is written to")
    parser.add_argument("data", nargs="+", help="CAPABILITY=FILE")
    parser.add_argument("--need", action="append", help="capability that the use asks for, all by default")
    parser.add_argument("--limit", type=int, help="documents of each file")
    arguments = parser.parse_args()

    source, target = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto") for name in (arguments.source, arguments.target)
    )
    source_tokenizer, target_tokenizer = map(AutoTokenizer.from_pretrained, (arguments.source, arguments.target))
    mapper = KVMapper.from_pretrained(arguments.mapper)
    mapper.evidence = evaluate_mapper(
        mapper,
        source,
        target,
        dict(entry.split("=", 1) for entry in arguments.data),
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        limit=arguments.limit,
    )
    mapper.evidence.save(arguments.mapper)
    print(mapper.evidence.to_markdown())

    gate = FidelityGate(capabilities=arguments.need and tuple(arguments.need))
    verdict = gate.admit(mapper, source, target, source_tokenizer=source_tokenizer, target_tokenizer=target_tokenizer)
    print(verdict)
    sys.exit(0 if verdict.admitted else 1)


if __name__ == "__main__":
    main()

"""
Retrieval: passages are read once, each alone, by a small model. A question finds some of them by its words, and
another model answers: it is handed what was read, at the places that the passages have in its prompt, and reads again
itself the share of their tokens that it makes the most else of.

    python examples/retrieval.py "Who brought the generator?" "How many steps has the tower?"
"""

import argparse
import math
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import FidelityGate, KVMapper, Segment, SourceKV, TranslatedCache, generate
from hf_kvtransfer.demo_models import load_demo_model


HERE = Path(__file__).parent
MAPPER = HERE.parent / "mappers" / "smollm2-135m-instruct--gemma-3-270m"


def words(text):
    return set(re.findall(r"\w+", text.lower()))


def find(passages, question, count):
    """Numbers of the passages that share most with the question, rare words counting more; in the text's order."""
    found = [words(passage) for passage in passages]
    rarity = {word: math.log(len(found) / sum(word in some for some in found)) for word in set.union(*found)}
    score = [sum(rarity[word] for word in some & words(question)) for some in found]
    return sorted(sorted(range(len(passages)), key=lambda i: -score[i])[:count])


def put_together(passages, read, mapper, question, tokenizer):
    """The target's prompt, `[1, tokens]`, and a segment of it for each passage, tokenized as it is alone."""
    ids, segments = [], []
    for passage, source_kv in zip(passages, read, strict=True):
        start = len(ids)
        ids += tokenizer(passage, add_special_tokens=not ids).input_ids
        segments.append(Segment(start, len(ids), source_kv, mapper))
    ids += tokenizer(f"Question: {question}\nAnswer:", add_special_tokens=False).input_ids
    return torch.tensor([ids]), segments


def load(name):
    """A model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--source", help="folder or Hub id, by default SmolLM2-135M-Instruct")
    parser.add_argument("--target", help="by default Gemma 3 270M")
    parser.add_argument("--mapper", default=str(MAPPER), help="folder or Hub id")
    parser.add_argument("--text", type=Path, default=HERE / "harbour.txt", help="paragraphs of it are the passages")
    parser.add_argument("--passages", type=int, default=2, help="for each question")
    parser.add_argument("--effort", type=float, default=0.15, help="share of their tokens that the target reads again")
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()

    source, source_tokenizer = load(arguments.source) if arguments.source else load_demo_model("smollm2-135m-instruct")
    target, target_tokenizer = load(arguments.target) if arguments.target else load_demo_model("gemma-3-270m")
    mapper = KVMapper.from_pretrained(arguments.mapper, dtype=target.dtype)
    # What reading a story asks of the mapper, see quickstart.py.
    gate = FidelityGate(capabilities=("everyday text", "knowledge", "reasoning"))

    passages = [f"{part.strip()}\n\n" for part in arguments.text.read_text(encoding="utf-8").split("\n\n")]
    read = [SourceKV.prefill(source, source_tokenizer, passage) for passage in passages]
    print(f"{len(passages)} passages, {sum(map(len, read))} tokens read once")
    for question in arguments.questions:
        chosen = find(passages, question, arguments.passages)
        given = [[some[i] for i in chosen] for some in (passages, read)]
        input_ids, segments = put_together(*given, mapper, question, target_tokenizer)
        cache = TranslatedCache.from_segments(
            segments, target, input_ids, target_tokenizer=target_tokenizer, effort=arguments.effort, gate=gate
        )
        print(f"\n> {question}\npassages {chosen}; {cache.report}")
        options = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
        output = generate(target, {"input_ids": input_ids}, cache, **options)
        print(target_tokenizer.decode(output[0, input_ids.shape[1] :]).strip())


if __name__ == "__main__":
    main()

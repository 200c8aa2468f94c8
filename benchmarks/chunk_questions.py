"""
Questions over several chunks: on a fact that stands in one, on facts of two, on one that says "she" of somebody in the
chunk before, and what comes next in a text.
"""

import random
from collections.abc import Sequence

from hf_kvtransfer.reuse import ReuseQuestion


THINGS = ("brass lantern", "silver flute", "old map", "blue bicycle", "paper mill", "glass boat", "iron bell")
FIRST = ("Ilse", "Tobias", "Marta", "Anders", "Clara", "Jonas", "Vera", "Emil", "Nora", "Oskar", "Greta", "Felix")
WOMEN = FIRST[::2]
LAST = ("Maren", "Crane", "Holm", "Oyen", "Brandt", "Falk", "Lund", "Seidel", "Voss", "Winter", "Kessler", "Thorn")
TOWNS = ("Brennick", "Calder", "Aldmoor", "Stavern", "Hollin", "Merrow", "Tarnby", "Wexham", "Orsett", "Kilvey")


def one_source(texts: Sequence[str], num_chunks: int, length: int) -> list[ReuseQuestion]:
    """
    Each chunk says in the middle of other text who keeps something; the question is about one of them.

    Args:
        texts (`Sequence[str]`):
            The other text.
        num_chunks (`int`), length (`int`):
            Chunks of a question, and characters of other text in each.
    """
    questions = []
    for number, passages in enumerate(_passages(texts, num_chunks, length)):
        draw = random.Random(number)
        things, names = draw.sample(THINGS, num_chunks), _names(draw, num_chunks)
        facts = [f"The {thing} is kept by {name}." for thing, name in zip(things, names, strict=True)]
        asked = draw.randrange(num_chunks)
        questions.append(
            ReuseQuestion(
                tuple(map(_with_fact, passages, facts)),
                f"\n\nQuestion: Who keeps the {things[asked]}?\nAnswer: The {things[asked]} is kept by",
                f" {names[asked]}",
                num_sources=1,
            )
        )
    return questions


def two_sources(texts: Sequence[str], num_chunks: int, length: int) -> list[ReuseQuestion]:
    """
    As [`one_source`], and each chunk goes on with where the keeper of the thing in the chunk before lives.
    """
    questions = []
    for number, passages in enumerate(_passages(texts, num_chunks, length)):
        draw = random.Random(number)
        things, names = draw.sample(THINGS, num_chunks), _names(draw, num_chunks)
        towns = draw.sample(TOWNS, num_chunks)
        facts = [f"The {things[0]} is kept by {names[0]}."]
        for i in range(1, num_chunks):
            facts.append(f"{names[i - 1]} lives in {towns[i]}. The {things[i]} is kept by {names[i]}.")
        asked = draw.randrange(num_chunks - 1)
        questions.append(
            ReuseQuestion(
                tuple(map(_with_fact, passages, facts)),
                f"\n\nQuestion: Where does the keeper of the {things[asked]} live?\n"
                f"Answer: The keeper of the {things[asked]} lives in",
                f" {towns[asked + 1]}",
                num_sources=2,
            )
        )
    return questions


def references(texts: Sequence[str], num_chunks: int, length: int) -> list[ReuseQuestion]:
    """
    As a document cut into chunks: each ends with somebody, of whom the next one begins to tell and says "she". Who
    that is, only a reader of both knows; read alone, a chunk says where somebody lives.
    """
    questions = []
    for number, passages in enumerate(_passages(texts, num_chunks, length)):
        draw = random.Random(number)
        things, names = draw.sample(THINGS, num_chunks), _names(draw, num_chunks, WOMEN)
        towns = draw.sample(TOWNS, num_chunks)
        chunks = []
        for i, passage in enumerate(passages):
            beginning = f" She lives in {towns[i]}. " if i else ""
            chunks.append(f"{beginning}{passage.strip()}. {names[i]} keeps the {things[i]}.")
        asked = draw.randrange(num_chunks - 1)
        questions.append(
            ReuseQuestion(
                tuple(chunks),
                f"\n\nQuestion: Where does {names[asked]} live?\nAnswer: {names[asked]} lives in",
                f" {towns[asked + 1]}",
                num_sources=2,
            )
        )
    return questions


def continuations(texts: Sequence[str], num_chunks: int, length: int, answer: int = 140) -> list[ReuseQuestion]:
    """
    Texts cut into chunks that follow each other. What comes next depends on all of them, and each on those before.

    Args:
        texts (`Sequence[str]`):
            The texts.
        num_chunks (`int`), length (`int`), answer (`int`, *optional*, defaults to 140):
            Chunks of a text, and characters of each and of what comes next.
    """
    questions = []
    for text in texts:
        *chunks, question = _cut(text, num_chunks + 1, length)
        asked, following = _cut(question, 2, 60)
        if len(chunks) == num_chunks and len(following) >= answer:
            end = following.find(" ", answer)
            questions.append(ReuseQuestion(tuple(chunks), asked, following[: end if end > 0 else None], num_chunks))
    return questions


def _names(draw: random.Random, count: int, firsts: Sequence[str] = FIRST) -> list[str]:
    drawn = zip(draw.sample(firsts, count), draw.sample(LAST, count), strict=True)
    return [f"{first} {last}" for first, last in drawn]


def _passages(texts: Sequence[str], num_chunks: int, length: int) -> list[list[str]]:
    """For each text a passage of it, and one of each of some others."""
    starts = [_cut(text, 2, length)[0] for text in texts]
    return [[starts[(i + j) % len(starts)] for j in range(num_chunks)] for i in range(len(starts))]


def _with_fact(passage: str, fact: str) -> str:
    before, behind = _cut(passage, 2, len(passage) // 2)
    return f"{before.strip()} {fact}{behind.rstrip()}\n\n"


def _cut(text: str, parts: int, length: int) -> list[str]:
    """Parts of about a length, cut before a space; the last is what is left."""
    cut = []
    for _ in range(parts - 1):
        end = text.find(" ", length)
        end = len(text) if end < 0 else end
        cut.append(text[:end])
        text = text[end:]
    return [*cut, text]

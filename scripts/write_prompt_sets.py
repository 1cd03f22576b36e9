"""Writes the prompt sets that this project makes itself: words to draw, compositions, arithmetic.

    python scripts/write_prompt_sets.py --out datasets      # datasets/{ocr,compositional,arithmetic}/{train,test}.jsonl

Every choice is a keyed hash, so the files are the same on every machine, byte for byte. A subject of a test file (a
text, a scene or a calculation) is in no training file, even in other words.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SIZES = {"train": 300, "test": 60}
TEST_SHARE = 6
"""One of this many subjects is in the test split."""


@dataclass(frozen=True)
class Line:
    """One line of a file."""

    prompt: str
    thing: str
    """The subject of the line in a normal form. Different lines have different subjects."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def split(self) -> str:
        return "test" if keyed("split", self.thing) % TEST_SHARE == 0 else "train"


def keyed(*key: object) -> int:
    """Returns a pseudo-random number that depends only on the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def pick(options: Sequence[T], *key: object) -> T:
    """Returns one of the options, chosen by the key."""
    return options[keyed(*key) % len(options)]


def some(options: Sequence[T], number: int, *key: object) -> list[T]:
    """Returns `number` different options in an order that the key decides."""
    return sorted(options, key=lambda option: keyed(*key, option))[:number]


# Words to draw

PLACES = (
    "a wooden sign above a shop door that says {}",
    "a neon sign in a dark window that reads {}",
    "a white mug with {} printed on it",
    "a chalkboard in a cafe with {} written in white chalk",
    "a T-shirt on a hanger with {} across the chest",
    "a book cover titled {}",
    "a birthday cake with {} in red icing",
    "a street poster that says {} in large letters",
    "an old train ticket stamped {}",
    "a road sign that reads {} beside a field",
    "a cardboard box labelled {}",
    "a brick wall with {} painted in blue",
)
STYLES = ("photo", "oil painting", "watercolor", "flat illustration", "close-up photo", "film still")
FIRST = (
    "Open", "Fresh", "Quiet", "Happy", "Lost", "Early", "Golden", "Late", "Wild", "Small",
    "Brave", "Green", "Sweet", "Silent", "Warm", "Old", "New", "Bright", "Hidden", "Free",
)  # fmt: skip
SECOND = (
    "Bakery", "Harbor", "Coffee", "Garden", "Library", "Morning", "Museum", "Orchard", "Market", "Station",
    "Theatre", "Village", "Bridge", "Kitchen", "Records", "Flowers", "Letters", "Mountain", "Lantern", "River",
)  # fmt: skip
SAYINGS = ("Mind the {}", "Welcome to the {}", "No {} Today", "{} for Sale", "Closed for {}", "Save the {}")


def words_to_draw() -> Iterator[Line]:
    """Yields prompts for images with a quoted text."""
    for number in count():
        text = pick((one_word, two_words, word_and_number, saying), "kind", number)(number)
        place = pick(PLACES, "place", number).format(f'"{text}"')
        prompt = f"{place}, {pick(STYLES, 'style', number)}"
        yield Line(prompt, text.lower(), {"text": text, "words": len(text.split())})


def one_word(number: int) -> str:
    word = pick(FIRST + SECOND, "word", number)
    return word.upper() if keyed("upper", number) % 3 == 0 else word


def two_words(number: int) -> str:
    return f"{pick(FIRST, 'first', number)} {pick(SECOND, 'second', number)}"


def word_and_number(number: int) -> str:
    return f"{pick(SECOND, 'before', number)} {10 + keyed('digits', number) % 990}"


def saying(number: int) -> str:
    return pick(SAYINGS, "saying", number).format(pick(SECOND, "about", number))


# Compositions

THINGS = (
    ("apple", "apples"), ("ball", "balls"), ("bird", "birds"), ("book", "books"), ("bottle", "bottles"),
    ("cake", "cakes"), ("car", "cars"), ("cat", "cats"), ("chair", "chairs"), ("clock", "clocks"),
    ("cup", "cups"), ("dog", "dogs"), ("hat", "hats"), ("kite", "kites"), ("lamp", "lamps"), ("vase", "vases"),
)  # fmt: skip
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white")
NUMBERS = ("two", "three", "four", "five", "six")
RELATIONS = ("to the left of", "to the right of", "above", "below")
Question = tuple[str, str]
"""A question about the image, and its answer in one word."""


def compositions() -> Iterator[Line]:
    """Yields prompts with numbers, colors and places of things, with the questions that check an image."""
    makers = (counted, colored, placed, counted_and_colored, colored_and_placed)
    for number in count():
        prompt, questions, skills = pick(makers, "scene", number)(number)
        metadata = {"vqa_list": questions, "atom_count": len(questions), "skills": skills}
        yield Line(prompt, json.dumps(sorted(questions)), metadata)


Scene = tuple[str, list[Question], list[str]]


def counted(number: int) -> Scene:
    """Returns a scene such as three cats and two cups."""
    (_, first), (_, second) = some(THINGS, 2, "counted", number)
    many, few = pick(NUMBERS, "many", number), pick(NUMBERS, "few", number)
    questions = [how_many(first, many), how_many(second, few)]
    return f"a picture of {many} {first} and {few} {second}", questions, ["count", "count"]


def colored(number: int) -> Scene:
    """Returns a scene such as a red apple and a blue chair."""
    things = [one for one, _ in some(THINGS, 2, "colored", number)]
    colors = some(COLORS, 2, "colors", number)
    pairs = list(zip(colors, things, strict=True))
    questions = [question for color, thing in pairs for question in (is_there(thing), what_color(thing, color))]
    shown = " and ".join(f"{article(color)} {color} {thing}" for color, thing in pairs)
    return f"a photo of {shown}", questions, ["object", "attribute"] * 2


def placed(number: int) -> Scene:
    """Returns a scene such as a cat to the left of a lamp."""
    first, second = (one for one, _ in some(THINGS, 2, "placed", number))
    relation = pick(RELATIONS, "relation", number)
    questions = [is_there(first), is_there(second), where(first, relation, second)]
    prompt = f"{article(first)} {first} {relation} {article(second)} {second}"
    return prompt, questions, ["object", "object", "position"]


def counted_and_colored(number: int) -> Scene:
    """Returns a scene such as four green bottles."""
    _, things = pick(THINGS, "both", number)
    many, color = pick(NUMBERS, "how many", number), pick(COLORS, "which color", number)
    questions = [how_many(things, many), (f"What color are the {things}?", color)]
    return f"{many} {color} {things} on a table", questions, ["count", "attribute"]


def colored_and_placed(number: int) -> Scene:
    """Returns a scene such as a red ball above a white hat."""
    first, second = (one for one, _ in some(THINGS, 2, "all", number))
    colors = some(COLORS, 2, "all colors", number)
    relation = pick(RELATIONS, "all relations", number)
    questions = [what_color(first, colors[0]), what_color(second, colors[1]), where(first, relation, second)]
    prompt = f"{article(colors[0])} {colors[0]} {first} {relation} {article(colors[1])} {colors[1]} {second}"
    return prompt, questions, ["attribute", "attribute", "position"]


def is_there(thing: str) -> Question:
    return f"Is there {article(thing)} {thing} in the picture?", "yes"


def how_many(things: str, number: str) -> Question:
    return f"How many {things} are in the picture?", number


def what_color(thing: str, color: str) -> Question:
    return f"What color is the {thing}?", color


def where(thing: str, relation: str, other: str) -> Question:
    return f"Is the {thing} {relation} the {other}?", "yes"


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


# Arithmetic

BOXED = r"Put the final answer in \boxed{}."
NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Farid", "Grace", "Hana")
GOODS = ("apples", "pencils", "stamps", "marbles", "cards", "shells")


def arithmetic() -> Iterator[Line]:
    """Yields calculations in symbols and in words. The metadata key `expression` has the formula."""
    for number in count():
        prompt, expression, answer = pick((sums, products, brackets, shared, bought), "calculation", number)(number)
        yield Line(f"{prompt} {BOXED}", expression, {"answer": str(answer), "expression": expression})


Calculation = tuple[str, str, int]


def between(low: int, high: int, *key: object) -> int:
    """Returns an integer from `low` to `high`, both included."""
    return low + keyed(*key) % (high - low + 1)


def sums(number: int) -> Calculation:
    a, b, c = sorted((between(10, 500, "sums", part, number) for part in range(3)), reverse=True)
    return f"Compute {a} + {b} - {c}.", f"{a} + {b} - {c}", a + b - c


def products(number: int) -> Calculation:
    a, b = sorted(between(11, 99, "products", part, number) for part in range(2))
    return f"What is {a} times {b}?", f"{a} * {b}", a * b


def brackets(number: int) -> Calculation:
    a, b, c = (between(2, 30, "brackets", part, number) for part in range(3))
    b, c = sorted((b, c))
    return f"Compute {a} * ({b} + {c}).", f"{a} * ({b} + {c})", a * (b + c)


def shared(number: int) -> Calculation:
    each, people = between(3, 40, "each", number), between(2, 12, "people", number)
    goods = pick(GOODS, "goods", number)
    total = each * people
    prompt = f"{total} {goods} are shared equally among {people} children. How many {goods} does each child get?"
    return prompt, f"{total} / {people}", each


def bought(number: int) -> Calculation:
    name, goods = pick(NAMES, "name", number), pick(GOODS, "bought", number)
    had, packs, size = between(5, 60, "had", number), between(2, 9, "packs", number), between(4, 24, "size", number)
    prompt = f"{name} has {had} {goods} and buys {packs} packs of {size}. How many {goods} does {name} have now?"
    return prompt, f"{had} + {packs} * {size}", had + packs * size


SETS: dict[str, Callable[[], Iterator[Line]]] = {
    "ocr": words_to_draw,
    "compositional": compositions,
    "arithmetic": arithmetic,
}


def files_of(name: str) -> dict[str, str]:
    """Returns {file name: content}. Files have the number of lines in SIZES, all with different subjects."""
    lines: dict[str, list[str]] = {split: [] for split in SIZES}
    seen = set()
    for line in SETS[name]():
        if line.thing not in seen and len(lines[line.split]) < SIZES[line.split]:
            lines[line.split].append(json.dumps({"prompt": line.prompt, "metadata": line.metadata}) + "\n")
        seen.add(line.thing)
        if all(len(texts) == SIZES[split] for split, texts in lines.items()):
            break
    return {f"{split}.jsonl": "".join(texts) for split, texts in lines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for name in SETS:
        (out / name).mkdir(parents=True, exist_ok=True)
        for file, content in files_of(name).items():
            (out / name / file).write_text(content, encoding="utf-8")
            print(f"{out / name / file}: {content.count(chr(10))} prompts")


if __name__ == "__main__":
    main()

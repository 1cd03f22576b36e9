"""Makes the weights of the prompt enhancer of the quick start: a small Qwen3 that turns terse requests into captions.

The requests are abbreviations, synonyms, words of other languages and misspelled words for a colored shape. In the
training texts each attribute of the caption is wrong with probability `--wrong`. The model thus learns the form of a
caption together with the mistakes. RL then teaches it captions that give the requested image.

    python scripts/pretrain_rewriter_quickstart.py --out unirl/models/qwen3/quickstart_rewriter   # about a minute
    python scripts/pretrain_rewriter_quickstart.py --prompts datasets/requests      # the prompt files, in a second
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.pretrain_llm_quickstart import Settings, build_model, build_tokenizer, save, train
from scripts.quickstart_tasks import COLORED_SHAPES, Drawing

COLORS: Mapping[str, tuple[str, ...]] = {
    "red": ("r", "crimson", "rot", "rouge", "rojo"),
    "green": ("g", "emerald", "gruen", "vert", "verde"),
    "blue": ("b", "azure", "blau", "bleu", "azul"),
    "yellow": ("y", "golden", "gelb", "jaune", "amarillo"),
    "purple": ("p", "violet", "lila", "mauve", "morado"),
    "white": ("w", "snowy", "weiss", "blanc", "blanco"),
}
SHAPES: Mapping[str, tuple[str, ...]] = {
    "circle": ("c", "disc", "Kreis", "cercle", "circulo"),
    "square": ("s", "box", "Quadrat", "carre", "cuadrado"),
    "triangle": ("t", "wedge", "Dreieck", "trigone", "triangulo"),
    "cross": ("x", "plus", "Kreuz", "croix", "cruz"),
}
"""A value to its abbreviation, a synonym, and the word in German, French and Spanish."""
NUM_KINDS = 5
WORDS = ("system", "user", "assistant", "a", *(f" {word}" for word in (*COLORS, *SHAPES)))
"""Each of these is one token. Every byte of anything else is a token."""
SETTINGS = Settings(steps=700, batch_size=64, learning_rate=3e-3)


def request(drawing: Drawing, kind: int, rng: random.Random) -> str:
    """Returns a terse request for a drawing: of one kind of words, or with misspelled English words."""
    color, shape = drawing
    if kind < NUM_KINDS:
        words = [COLORS[color][kind], SHAPES[shape][kind]]
        return " ".join(words[::-1] if kind in (3, 4) else words)  # in French and Spanish the color comes last
    return f"{misspelled(color, rng)} {misspelled(shape, rng)}"


def misspelled(word: str, rng: random.Random) -> str:
    """Returns a word with two letters exchanged, one left out, or one written twice."""
    place = rng.randrange(1, len(word) - 1)
    mistakes = (
        word[:place] + word[place + 1] + word[place] + word[place + 2 :],
        word[:place] + word[place + 1 :],
        word[: place + 1] + word[place:],
    )
    return rng.choice(mistakes)


def caption(drawing: Drawing, wrong: float, rng: random.Random) -> str:
    """Returns a caption of which each attribute is wrong with probability `wrong`."""
    values = []
    for value, known in zip(drawing, (list(COLORS), list(SHAPES)), strict=True):
        others = [other for other in known if other != value]
        values.append(rng.choice(others) if rng.random() < wrong else value)
    return f"a {values[0]} {values[1]}"


def lessons(wrong: float, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields requests with captions without end."""
    while True:
        drawing = rng.choice(COLORED_SHAPES.drawings)
        yield request(drawing, rng.randrange(NUM_KINDS + 1), rng), caption(drawing, wrong, rng)


def write_prompts(folder: Path) -> None:
    """Writes train.jsonl and eval.jsonl: six requests for every drawing. No drawing is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    held_out = [drawing for drawing in COLORED_SHAPES.drawings if drawing in COLORED_SHAPES.held_out]
    files: Sequence[tuple[str, Sequence[Drawing]]] = (("train", COLORED_SHAPES.shown), ("eval", held_out))
    for name, drawings in files:
        rows = [
            {"prompt": request(drawing, kind, rng), "metadata": COLORED_SHAPES.metadata(drawing)}
            for drawing, kind in itertools.product(drawings, range(NUM_KINDS + 1))
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write the model to")
    parser.add_argument("--prompts", type=Path, help="folder to write train.jsonl and eval.jsonl to")
    parser.add_argument("--wrong", type=float, default=0.5, help="probability that an attribute of a caption is wrong")
    options = parser.parse_args()
    if options.prompts:
        write_prompts(options.prompts)
    if options.out:
        torch.manual_seed(SETTINGS.seed)
        tokenizer = build_tokenizer(WORDS)
        model = build_model(tokenizer)
        train(model, tokenizer, SETTINGS, lessons(options.wrong, random.Random(SETTINGS.seed)))
        save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()

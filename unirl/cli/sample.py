"""`unirl sample RUN -p "a prompt"`: pictures drawn with a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.cli.arguments import Parser, split_settings
from unirl.cli.failures import Session
from unirl.config.errors import DataError, UsageError

EXAMPLES = (
    'unirl sample runs/unirl/first -p "a red circle" -p "a blue square"',
    "unirl sample runs/unirl/first --prompts my_prompts.txt --count 8 --seed 7",
    'unirl sample runs/unirl/first/checkpoints/checkpoint-000050 -p "a red circle" --out pictures',
)
TILE = 128
"""Smaller pictures are enlarged to about this many pixels on the grid."""


def run(argv: list[str], session: Session) -> int:
    from unirl.cli.runs import open_saved, output_folder, saved_run

    parser = _parser()
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    texts = _texts(options.prompt, options.prompts)
    evaluation = {"samples_per_prompt": options.count, "weights": options.weights, "seed": options.seed}
    out = output_folder(options.run, "drawn", options.out)
    saved = saved_run(options.run, overrides, {"evaluation": evaluation})
    with open_saved(saved, out, session) as trainer:
        trainer.load(saved.checkpoint)
        pictures = _draw(trainer, texts)
    print(f"{len(pictures)} pictures   {_save(pictures, options.count, out)}")
    return 0


def _parser() -> Parser:
    parser = Parser("sample", "Draw pictures with a checkpoint: a row of the grid per prompt.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.option("--prompts", metavar="FILE", help="a file with a prompt per line")
    parser.option("--count", type=int, default=4, metavar="N", help="pictures per prompt (default 4)")
    parser.option("--seed", type=int, default=42, help="default 42")
    parser.option("--weights", choices=("live", "ema"), default="live", help="which weights (default live)")
    parser.option("--out", metavar="DIR", help="default: RUN/drawn/...")
    return parser


def _texts(prompts: Sequence[str], file: str | None) -> list[str]:
    texts = list(prompts)
    if file is not None:
        try:
            texts += [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise DataError(
                f"--prompts {file}: {error.strerror}. Give a text file with a prompt per line", code=4002
            ) from error
    if not texts:
        raise UsageError('unirl sample: what shall be drawn? Give -p "a prompt", or --prompts FILE', code=2002)
    return texts


def _draw(trainer, texts: Sequence[str]):
    """[B, 3, H, W] uint8, the pictures of a prompt adjacent."""
    from unirl.data.datasets import Prompt

    _, resp = trainer.draw([Prompt(text=text, prompt_id=f"{i:03d}") for i, text in enumerate(texts)])
    return trainer.roles.rollout.preview(resp.tracks[trainer.track].decoded).pixels


def _save(pictures, columns: int, folder: Path) -> Path:
    """Every picture as PNG, and all on one grid, whose path is given back."""
    from PIL import Image

    images = [Image.fromarray(picture) for picture in pictures.permute(0, 2, 3, 1).cpu().numpy()]
    for i, image in enumerate(images):
        image.save(folder / f"p{i // columns:02d}-s{i % columns:02d}.png")
    grid = _grid(images, columns)
    grid.save(folder / "grid.png")
    return folder / "grid.png"


def _grid(images: Sequence[Any], columns: int):
    from PIL import Image

    scale = max(1, TILE // max(images[0].size))
    width, height = (side * scale for side in images[0].size)
    grid = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for i, image in enumerate(images):
        tile = image.resize((width, height), Image.Resampling.NEAREST)
        grid.paste(tile, (i % columns * width, i // columns * height))
    return grid

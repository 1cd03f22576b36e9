"""`unirl sample RUN -p "a prompt"`: images, videos or texts sampled from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.cli.arguments import Parser, split_settings
from unirl.config.errors import ArgumentError
from unirl.config.failures import Session

if TYPE_CHECKING:
    from unirl.data.datasets import Prompt
    from unirl.tracking.samples import Media

EXAMPLES = (
    'unirl sample runs/unirl/first -p "a red circle" -p "a blue square"',
    "unirl sample runs/unirl/first --prompts my_prompts.txt --count 8 --seed 7",
    'unirl sample runs/unirl/first/checkpoints/checkpoint-000050 -p "a red circle" --out images',
    'unirl sample runs/unirl/llm -p "What is 17 + 25?" evaluation.temperature=0 --count 1',
)


def run(argv: list[str], session: Session) -> int:
    from unirl.cli.arguments import output_folder
    from unirl.data.data_source import by_size
    from unirl.trainer.assemble import build_trainer
    from unirl.trainer.saved_runs import quiet_tracker, saved_run

    parser = _parser()
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    prompts = _prompts(options.prompt, options.prompts)
    evaluation = {"samples_per_prompt": options.count, "weights": options.weights, "seed": options.seed}
    out = output_folder(options.run, "drawn", options.out)
    saved = saved_run(options.run, overrides, {"evaluation": evaluation})
    with build_trainer(saved.recipe, session, tracker=quiet_tracker(saved, out, session.argv)) as trainer:
        trainer.load(saved.checkpoint)
        drawn = [(some, _draw(trainer, some)) for some in by_size(trainer.data.sized(prompts))]
    for some, media in drawn:
        for line in [*media.console_lines(), *media.remarks()]:
            print(line)
        page = media.gallery([prompt.text for prompt in some], _folder(out, some[0].size, len(drawn)))
        print(f"{len(media)} {media.kind}s   {page}")
    return 0


def _folder(out: Path, size: tuple[int, int] | None, num_sizes: int) -> Path:
    """The folder for samples of one size: `out`, or a folder in it if there are several sizes."""
    folder = out if num_sizes == 1 or size is None else out / f"{size[0]}x{size[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _parser() -> Parser:
    parser = Parser("sample", "Sample images, videos or texts from a checkpoint, several for each prompt.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.option("--prompts", metavar="FILE", help="a prompt file, like that of a recipe")
    parser.option("--count", type=int, default=4, metavar="N", help="samples per prompt (default 4)")
    parser.option("--seed", type=int, default=42, help="default 42")
    parser.option("--weights", choices=("live", "ema"), default="live", help="which weights (default live)")
    parser.option("--out", metavar="DIR", help="default: RUN/drawn/...")
    return parser


def _prompts(texts: Sequence[str], file: str | None) -> list[Prompt]:
    from unirl.data.datasets import Prompt, load_prompts
    from unirl.data.images import check_images

    prompts = [Prompt(text=text, prompt_id="") for text in texts]
    prompts += load_prompts(file) if file is not None else ()
    if not prompts:
        raise ArgumentError('unirl sample: no prompt is given. Use -p "a prompt" or --prompts FILE')
    check_images(prompts)
    return [replace(prompt, prompt_id=f"{i:03d}") for i, prompt in enumerate(prompts)]


def _draw(trainer, prompts: Sequence[Prompt]) -> Media:
    """The samples of a prompt adjacent; prompts of one size."""
    from unirl.tracking.media import media_of

    _, resp = trainer.evaluator.sample(prompts, trainer.state.version)
    return media_of(trainer.roles.rollout.preview(resp.tracks[trainer.track].decoded))

"""`unirl sample RUN -p "a prompt"`: images, videos or texts sampled from a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from unirl.cli.arguments import Parser, output_folder, split_settings
from unirl.cli.start import shown_start
from unirl.config.errors import ArgumentError, InvalidValueError
from unirl.config.failures import Session
from unirl.data.data_source import by_size
from unirl.data.datasets import Prompt, load_prompts
from unirl.data.images import check_images
from unirl.tracking.media import media_of
from unirl.tracking.samples import Gallery, Media
from unirl.tracking.streams import print_inert
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.trainer.run_folder import check_folder, check_weights, quiet_tracker, saved_run

EXAMPLES = (
    'unirl sample runs/unirl/first -p "a red circle" -p "a blue square"',
    "unirl sample runs/unirl/first --prompts my_prompts.txt --count 8 --seed 7",
    'unirl sample runs/unirl/first/checkpoints/checkpoint-000050 -p "a red circle" --out images',
    'unirl sample runs/unirl/llm -p "What is 17 + 25?" evaluation.temperature=0 --count 1',
)


def run(argv: list[str], session: Session) -> int:
    parser = Parser("sample", "Sample images, videos or texts from a checkpoint, several for each prompt.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.option("--prompts", metavar="FILE", help="a prompt file, like that of a recipe")
    parser.option("--count", type=int, default=4, metavar="N", help="samples per prompt (default 4)")
    parser.option("--seed", type=int, default=42, help="default 42")
    parser.option("--weights", choices=("live", "ema"), default="live", help="which weights (default live)")
    parser.option("--out", metavar="DIR", help="default: RUN/drawn/...")
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    if options.count < 1:
        raise InvalidValueError(f"--count must be >= 1, got {options.count}")
    prompts = _prompts(options.prompt, options.prompts)
    evaluation = {"samples_per_prompt": options.count, "weights": options.weights, "seed": options.seed}
    out = output_folder(options.run, "drawn", options.out)
    saved = saved_run(options.run, overrides, {"evaluation": evaluation})
    check_weights(saved, options.weights)
    check_folder(out)
    # What a tracker writes would be empty: the manifest says how the samples were drawn.
    with (
        shown_start(Session(), "sampling") as shown,
        TemporaryDirectory() as unused,
        build_trainer(
            saved.recipe, session, tracker=quiet_tracker(saved, Path(unused), session.argv, shown)
        ) as trainer,
    ):
        trainer.state.load(saved.checkpoint)
        drawn = [(some, *_draw(trainer, some)) for some in by_size(trainer.data.sized(prompts))]
    run, checkpoint = saved.checkpoint.path.parent.parent.name, saved.checkpoint.path.name
    facts = {"seed": options.seed, "run": run, "checkpoint": checkpoint, "weights": options.weights}
    for some, media, rewrites in drawn:
        for line in [*media.console_lines(), *media.remarks()]:
            print_inert(line)
        size = some[0].size
        folder = out if len(drawn) == 1 or size is None else out / f"{size[0]}x{size[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        texts = tuple(prompt.text for prompt in some)
        page = media.gallery(Gallery(texts, options.count, facts, rewrites), folder)
        print(f"{len(media)} {media.kind}s   {page}")
    return 0


def _prompts(texts: Sequence[str], file: str | None) -> list[Prompt]:
    prompts = [Prompt(text=text, prompt_id="") for text in texts]
    prompts += load_prompts(file) if file is not None else ()
    if not prompts:
        raise ArgumentError('unirl sample: no prompt is given. Use -p "a prompt" or --prompts FILE')
    check_images(prompts)
    return [replace(prompt, prompt_id=f"{i:03d}") for i, prompt in enumerate(prompts)]


def _draw(trainer: Trainer, prompts: Sequence[Prompt]) -> tuple[Media, tuple[str, ...]]:
    """The samples of prompts of one size, and the rewrites of which they were drawn. Those of a prompt are adjacent."""
    _, resp = trainer.evaluator.sample(prompts)
    track = resp.tracks[trainer.track]
    assert track.decoded is not None
    rewrites = () if track.parent_track is None else tuple(track.prompts or ())
    return media_of(trainer.rollout.preview(track.decoded)), rewrites

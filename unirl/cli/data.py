"""`unirl data check|preview|populate`: checks, shows and downloads prompt files."""

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from unirl.cli.arguments import Parser, run_verb, split_settings
from unirl.cli.check import checked
from unirl.cli.reward import scorer_of
from unirl.config.build import build
from unirl.config.errors import ArgumentError, DataError, InvalidValueError
from unirl.config.failures import Session
from unirl.config.load import Recipe
from unirl.data import populate as public
from unirl.data.datasets import Prompt, load_prompts, read_entries
from unirl.data.images import image_problems
from unirl.plan.prompts import load_data
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import unscorable
from unirl.tracking.streams import print_inert

EXAMPLES = (
    "unirl data check my_prompts.jsonl --reward ocr",
    "unirl data check --recipe diffusion/sd3_5_online_grpo_ocr",
    "unirl data preview datasets/ocr/train.jsonl -n 4",
    "unirl data populate gsm8k --out data/gsm8k",
)
SHOWN = 20
"""Number of problems that are printed; the others are only counted."""


def run(argv: list[str], session: Session) -> int:
    return run_verb("data", argv, {"check": check, "preview": preview, "populate": populate}, EXAMPLES)


# check


@dataclass
class FileReport:
    """The prompts and the problems of one file."""

    file: str
    prompts: list[Prompt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """The files to check, and the scorer and data source that must accept them."""

    files: tuple[str, ...]
    prompt_key: str = "prompt"
    scorers: tuple[RewardScorer, ...] = ()
    """The scorers that must be able to score the prompts. Without one, only the files are checked."""
    recipe: Recipe | None = None
    """A recipe whose data source must open, which may check more than the files."""


def check(argv: Sequence[str]) -> int:
    about = "Check prompt files as a run reads them, and whether a reward can score them. Lists every problem."
    parser = Parser("data check", about, EXAMPLES)
    parser.usage = "unirl data check FILE ... [--reward NAME] | --recipe R [key=value ...]"
    parser.add_argument("files", nargs="*", metavar="FILE", help="prompt files: .txt, .jsonl, .json, .parquet")
    parser.option("-r", "--reward", metavar="NAME", help="a scorer of `unirl reward ls`, or a class")
    parser.option("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of that scorer")
    parser.option("--plugins", default="", metavar="PACKAGE,...", help="packages whose classes -r may name")
    parser.option("--recipe", metavar="R", help="the files and the reward of this recipe; settings may follow")
    parser.option("--prompt-key", default="prompt", metavar="KEY", help="the key of the prompt in a JSON object")
    parser.option("--json", action="store_true", help="as JSON")
    words, settings = split_settings(argv, parser.takes_value)
    options = parser.parse(words)
    task = _task_of_recipe(options, settings) if options.recipe else _task_of_files(options, settings)
    reports = [_checked(file, task) for file in task.files]
    if options.json:
        print(
            json.dumps([{"file": f.file, "prompts": len(f.prompts), "problems": f.problems} for f in reports], indent=1)
        )
    _report(reports, quiet=options.json)
    if task.recipe is not None:
        load_data(task.recipe)
    return 0


def _task_of_files(options: Namespace, settings: Sequence[str]) -> Task:
    if settings:
        raise ArgumentError(f"unirl data check: '{settings[0]}' is a setting of a recipe, and none is named")
    if not options.files:
        raise ArgumentError("unirl data check: name a prompt file, or a recipe with --recipe")
    scorers = (scorer_of(options),) if options.reward else ()
    return Task(tuple(options.files), options.prompt_key, scorers)


def _task_of_recipe(options: Namespace, settings: Sequence[str]) -> Task:
    if options.files or options.reward:
        raise ArgumentError("unirl data check: --recipe has its own files and reward; do not name others")
    recipe = checked(options.recipe, settings)
    config = recipe.config
    files = [path for path in (config.data_path, config.evaluation.data_path) if path is not None]
    if not files:
        raise ArgumentError(f"recipe {options.recipe} reads no prompt file: there is nothing to check")
    return Task(
        files=tuple(dict.fromkeys(files)),
        prompt_key=config.data_source.get("prompt_key", str) or "prompt",
        scorers=tuple(build(scorer) for scorer in config.scorers),
        recipe=recipe,
    )


def _checked(file: str, task: Task) -> FileReport:
    report = FileReport(file)
    try:
        for entry in read_entries(Path(file), prompt_key=task.prompt_key):
            if isinstance(entry, DataError):
                report.problems.append(str(entry))
                continue
            report.prompts.append(entry)
            report.problems += [
                f"{entry.origin}: {why}" for why in unscorable(task.scorers, entry.text, entry.metadata)
            ]
    except DataError as error:  # the file as a whole
        report.problems.append(str(error))
    report.problems += map(str, image_problems(report.prompts))
    return report


def _report(reports: Sequence[FileReport], quiet: bool) -> None:
    """Prints the results. Raises DataError if there is any problem."""
    for one in [] if quiet else reports:
        if not one.problems:
            print_inert(f"{one.file}: {_summary(one.prompts)}; valid")
    for notice in _shared(reports):
        print(f"unirl: {notice}", file=sys.stderr)
    problems = [problem for one in reports for problem in one.problems]
    if problems:
        more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
        raise DataError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in prompt files:{listed}{more}")


def _shared(reports: Sequence[FileReport]) -> Iterator[str]:
    """Notices about prompts that occur in two files, such as a training file and a held-out file."""
    for one, other in combinations(reports, 2):
        texts = {prompt.text for prompt in one.prompts}
        both = sum(prompt.text in texts for prompt in other.prompts)
        if both:
            yield f"{both} of the {len(other.prompts)} prompts of {other.file} are also in {one.file}"


def _summary(prompts: Sequence[Prompt]) -> str:
    lengths = [len(prompt.text) for prompt in prompts]
    keys = sorted({key for prompt in prompts for key in prompt.metadata})
    num_with_images = sum(bool(prompt.media) for prompt in prompts)
    words = [f"{len(prompts)} prompt{'s' * (len(prompts) > 1)} of {min(lengths)} to {max(lengths)} characters"]
    words += [f"metadata {', '.join(keys)}"] if keys else []
    num_repeated = len(prompts) - len({(prompt.text, prompt.images) for prompt in prompts})
    words += [f"{num_repeated} occur{'s' * (num_repeated == 1)} more than once"] if num_repeated else []
    words += [f"{num_with_images} with images"] if num_with_images else []
    return "; ".join(words)


# preview


def preview(argv: Sequence[str]) -> int:
    parser = Parser("data preview", "Show the first prompts of a file with their metadata and media.", EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a prompt file: .txt, .jsonl, .json, .parquet")
    parser.option("-n", "--number", type=int, default=8, metavar="N", help="how many (default 8)")
    parser.option("--prompt-key", default="prompt", metavar="KEY", help="the key of the prompt in a JSON object")
    parser.option("--json", action="store_true", help="one complete JSON object per line")
    options = parser.parse(argv)
    if options.number < 1:
        raise InvalidValueError(f"-n must be >= 1, got {options.number}")
    prompts = load_prompts(Path(options.file), prompt_key=options.prompt_key)
    shown = prompts[: options.number]
    if options.json:
        for prompt in shown:
            print(json.dumps(_row(prompt)))
        return 0
    print_inert(f"{options.file}: {_summary(prompts)}")
    width = max(40, shutil.get_terminal_size().columns)
    for prompt in shown:
        about = {key: value for key, value in _row(prompt).items() if key not in ("id", "prompt") and value}
        print_inert(f"\n{prompt.prompt_id}\n{_cut('  ' + prompt.text, width)}")
        for key, value in about.items():
            print_inert(_cut(f"  {key}: {json.dumps(value, ensure_ascii=False)}", width))
    return 0


def _row(prompt: Prompt) -> dict[str, object]:
    media = [f"{ref.role} {ref.modality} {ref.uri}" for ref in prompt.media]
    return {"id": prompt.prompt_id, "prompt": prompt.text, "metadata": prompt.metadata, "media": media}


def _cut(line: str, width: int) -> str:
    flat = " ".join(line.splitlines())
    return flat if len(flat) <= width else flat[: width - 4] + " ..."


# populate


def populate(argv: Sequence[str]) -> int:
    about = "Download a public prompt set and write it as prompt files. Without a name, list the sets."
    parser = Parser("data populate", about, EXAMPLES)
    parser.add_argument("name", nargs="?", metavar="SET")
    parser.option("--out", metavar="DIR", help="where to write train.jsonl, test.jsonl (default data/SET)")
    parser.option("--endpoint", metavar="URL", help="a hub or its mirror (default: HF_ENDPOINT, else the public hub)")
    parser.option("--revision", metavar="R", help="a commit, branch or tag of the set (default: its newest state)")
    parser.option("--overwrite", action="store_true", help="replace files that exist")
    options = parser.parse(argv)
    if options.name is None:
        for name, one in public.SETS.items():
            print(f"{name:<14} {one.about} ({one.licence}; {one.repo})")
        return 0
    folder = Path(options.out or f"data/{options.name}")
    written = public.populate(
        options.name, folder, endpoint=options.endpoint, revision=options.revision, overwrite=options.overwrite
    )
    for file in written:
        print(f"{file}: {_summary(load_prompts(file))}")
    one = public.find_set(options.name)
    print(f"{one.repo} is published under {one.licence}: read its terms before you use it")
    return 0

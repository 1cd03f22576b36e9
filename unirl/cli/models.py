"""`unirl models check|pull`: model directories, and the files of a model on the hub."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from unirl.cli.arguments import Parser, run_verb
from unirl.cli.start import shown_start
from unirl.config.errors import NotFoundError
from unirl.config.failures import Session
from unirl.models.loading import hub

EXAMPLES = ("unirl models check ~/models/Qwen-Image --values", "unirl models pull Qwen/Qwen-Image --dry-run",
            "unirl models pull Qwen/Qwen-Image")  # fmt: skip
GB = 1e9


def run(argv: list[str], session: Session) -> int:
    return run_verb("models", argv, {"check": check, "pull": pull}, EXAMPLES)


def check(argv: Sequence[str]) -> int:
    parser = Parser("models check", "Compare the weight files of a model with its networks, without loading.", EXAMPLES)
    parser.add_argument("directory", metavar="DIR", help="a directory in the layout of diffusers or transformers")
    parser.option("--json", action="store_true", help="as JSON")
    parser.option("--values", action="store_true", help="also read all tensors, and refuse infinite values and NaN")
    options = parser.parse(argv)
    root = Path(options.directory).expanduser()
    if not root.is_dir():
        hint = f"`unirl models pull {options.directory}` fetches it" if hub.HUB_ID.fullmatch(options.directory) else ""
        raise NotFoundError(f"{root}: there is no such directory. {hint or 'Give the folder of a model'}")
    with shown_start(Session(), "checking"):
        from unirl.models.loading.completeness import listed_names
        from unirl.models.loading.inspection import inspect_model

        reports = inspect_model(root, options.values)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    for report in [] if options.json else reports:
        size = f"{report.num_tensors:6d} tensors {report.num_bytes / GB:8.3f} GB  {', '.join(report.dtypes):10}"
        number = len(report.unused)
        unused = f", {number} unused tensor{'s' * (number > 1)}: {listed_names(report.unused)}" if number else ""
        result = "cannot be loaded" if report.problem else f"complete{unused}"
        print(f"{report.component:16} {report.class_name:36} {size} {result}")
    problems = [report.problem for report in reports if report.problem]
    if problems:
        raise NotFoundError(f"{root} is not a complete model:" + "".join(f"\n  {line}" for line in problems))
    return 0


def pull(argv: Sequence[str]) -> int:
    parser = Parser("models pull", "Download the files of a model that a run reads. A second call resumes.", EXAMPLES)
    parser.add_argument("repository", metavar="ID", help="a hub id, such as Qwen/Qwen-Image")
    parser.option("--revision", help="a branch, tag or commit")
    parser.option("--dry-run", action="store_true", help="print the files and their sizes, and download nothing")
    options = parser.parse(argv)
    files = hub.files_to_fetch(options.repository, options.revision)
    for name, num_bytes in sorted(files.items()):
        print(f"{num_bytes / GB:10.3f} GB  {name}")
    print(f"{sum(files.values()) / GB:10.3f} GB  in {len(files)} files", flush=True)
    if not options.dry_run:
        is_pipeline = hub.MODEL_INDEX in files
        directory = hub.model_directory if is_pipeline else hub.language_directory
        print(directory(options.repository, options.revision))
    return 0

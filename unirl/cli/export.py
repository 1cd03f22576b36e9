"""`unirl export RUN`: trained weights as files that other libraries load, each compared with our sampler."""

from collections.abc import Sequence
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.start import shown_start
from unirl.config.errors import ArgumentError
from unirl.config.failures import Session
from unirl.train.backend.checkpoint import OPTIMIZER
from unirl.trainer.export import EXPORTS, ExportedFile, export_checkpoint
from unirl.trainer.hub import check_repo, push
from unirl.trainer.run_folder import saved_run

EXAMPLES = (
    "unirl export runs/unirl/first",
    "unirl export runs/unirl/first --format peft --out my_adapter",
    "unirl export runs/unirl/first/checkpoints/checkpoint-000050 --format full --weights ema",
    "unirl export runs/unirl/first --push-to-hub me/my-lora",
)
TEXTS = ("a red circle", "a blue square")
"""The prompts on which both sides are compared."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser(
        "export", "Write weights for other libraries, load them there and compare with our sampler.", EXAMPLES
    )
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("--format", choices=EXPORTS, action="append", help="default: the adapters' formats, or full")
    parser.option("--weights", default="live", metavar="NAME", help="live (default), or a snapshot such as ema")
    parser.option("--out", metavar="DIR", help="default: RUN/export/<checkpoint>")
    parser.option(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="upload the (first) format with its model card; of a run of several policies, each into OWNER/NAME-POLICY",
    )
    parser.option("--public", action="store_true", help="a repository that is made for it is public (default: private)")
    options = parser.parse(argv)
    if options.public and options.push_to_hub is None:
        raise ArgumentError("unirl export: --public needs --push-to-hub OWNER/NAME, the repository that it is for")
    if options.push_to_hub is not None:
        check_repo(options.push_to_hub)
    with shown_start(Session(), "exporting"):
        files = exported(options.run, options.format, options.weights, options.out)
    for line in lines_of(files):
        print(line)
    if options.push_to_hub is not None:
        for policy in dict.fromkeys(file.policy for file in files):
            folder = folder_of(next(file for file in files if file.policy == policy))
            repo = "-".join(filter(None, (options.push_to_hub, policy)))
            print(f"pushed           {folder} to {push(folder, repo, private=not options.public)}")
    return 0


def export(path: str) -> list[str]:
    """Writes and verifies the weights of the checkpoint at `path`. Returns a line per format."""
    return lines_of(exported(path))


def exported(
    path: str, formats: Sequence[str] | None = None, weights: str = "live", out: str | None = None
) -> list[ExportedFile]:
    """Writes and verifies the weights of the checkpoint at `path`."""
    folder = None if out is None else Path(out)
    return export_checkpoint(saved_run(path, unread=OPTIMIZER), TEXTS, formats, weights, folder)


def folder_of(file: ExportedFile) -> Path:
    """The folder of an export, which is named like its format."""
    return file.path if file.path.is_dir() else file.path.parent


def lines_of(files: Sequence[ExportedFile]) -> list[str]:
    """A line for each exported format."""
    width = max(15, *(len(file.format) for file in files))
    return [
        f"{file.format:<{width}}  {file.path}"
        + ("" if file.difference is None else f"   (loaded again and compared: max difference {file.difference:.1e})")
        for file in files
    ]

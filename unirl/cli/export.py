"""`unirl export RUN`: trained weights as files that other libraries load, compared there with our sampler."""

from collections.abc import Sequence
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.config.failures import Session
from unirl.train.backend.checkpoint import OPTIMIZER
from unirl.trainer.export import EXPORTS, export_checkpoint
from unirl.trainer.run_folder import saved_run

EXAMPLES = (
    "unirl export runs/unirl/first",
    "unirl export runs/unirl/first --format peft --out my_adapter",
    "unirl export runs/unirl/first/checkpoints/checkpoint-000050 --format full --weights ema",
)
TEXTS = ("a red circle", "a blue square")
"""The prompts on which both sides are compared."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser("export", "Write a checkpoint's weights for other libraries, and verify the file there.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("--format", choices=EXPORTS, action="append", help="default: the adapters' formats, or full")
    parser.option("--weights", default="live", metavar="NAME", help="live (default), or a snapshot such as ema")
    parser.option("--out", metavar="DIR", help="default: RUN/export/<checkpoint>")
    options = parser.parse(argv)
    for line in export(options.run, options.format, options.weights, options.out):
        print(line)
    return 0


def export(path: str, formats: Sequence[str] | None = None, weights: str = "live", out: str | None = None) -> list[str]:
    """Write and verify the weights of the checkpoint at `path`. Returns a line per format."""
    files = export_checkpoint(
        saved_run(path, unread=OPTIMIZER), TEXTS, formats, weights, None if out is None else Path(out)
    )
    return [
        f"{file.format:<15}{file.path}"
        + ("" if file.difference is None else f"   (compared there: max difference {file.difference:.1e})")
        for file in files
    ]

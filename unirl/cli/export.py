"""`unirl export RUN`: trained weights as files that other libraries load, compared there with our sampler."""

from collections.abc import Sequence
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.failures import Session

EXAMPLES = (
    "unirl export runs/unirl/first",
    "unirl export runs/unirl/first --format peft --out my_adapter",
    "unirl export runs/unirl/first/checkpoints/checkpoint-000050 --format full --weights ema",
)
FORMATS = ("diffusers-lora", "peft", "full")
"""Those of all models; pictures have the first, text has not."""
TEXTS = ("a red circle", "a blue square")
"""The prompts on which both sides are compared."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser("export", "Write a checkpoint's weights for other libraries, and verify the file there.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("--format", choices=FORMATS, action="append", help="default: the adapters' formats, or full")
    parser.option("--weights", default="live", metavar="NAME", help="live (default), or a snapshot such as ema")
    parser.option("--out", metavar="DIR", help="default: RUN/export/<checkpoint>")
    options = parser.parse(argv)
    for line in export(options.run, options.format, options.weights, options.out):
        print(line)
    return 0


def export(path: str, formats: Sequence[str] | None = None, weights: str = "live", out: str | None = None) -> list[str]:
    """Write and verify the weights of the checkpoint at `path`; gives back a line per format."""
    from unirl.cli.runs import saved_run
    from unirl.config.build import build

    saved = saved_run(path)
    exporter = _exporter(saved)
    checkpoint = saved.checkpoint.path
    folder = Path(out) if out else checkpoint.parent.parent / "export" / checkpoint.name
    sampling = build(saved.recipe.config.sampling)
    lines = []
    for name in formats or exporter.usual_formats:
        written = exporter.write(str(folder / name), name, weights)
        difference = exporter.verify(str(folder / name), name, TEXTS, sampling, weights)
        verdict = "" if difference is None else f"   (compared there: max difference {difference:.1e})"
        lines.append(f"{name:<15}{written}{verdict}")
    return lines


def _exporter(saved):
    """The model with the checkpoint's weights, without a rollout engine, rewards or data."""
    from unirl.config.build import build
    from unirl.trainer.build import device
    from unirl.trainer.export import Exporter

    config = saved.recipe.config
    wired = {"device": device(), "seed": saved.recipe.value("sampling.seed"), "run_updates": 1}
    bundle = build(config.bundle, **wired)
    pipeline = build(config.pipeline, bundle=bundle, **wired)
    backend = build(config.backend, bundle=bundle, **wired)
    backend.load_policy(str(saved.checkpoint.path / "policy"))
    lora = config.backend.values["lora_cfg"]
    return Exporter(pipeline, backend, None if lora is None else build(lora))

"""`unirl ckpt ls|verify|show|prune`: the checkpoints of a run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from unirl.cli.arguments import Parser, run_verb
from unirl.config.errors import ArgumentError, CheckpointError, InvalidValueError
from unirl.config.failures import Session
from unirl.tracking.streams import print_inert
from unirl.train.backend import checkpoint
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore, existing
from unirl.train.backend.manifest import read_manifest
from unirl.train.backend.signing import SIGNATURE, read_key

EXAMPLES = ("unirl ckpt ls runs/unirl/first", "unirl ckpt verify runs/unirl/first/checkpoints/checkpoint-000050",
            "unirl ckpt verify runs/unirl/first/checkpoints/checkpoint-000050 --deep --key env:CHECKPOINT_KEY",
            "unirl ckpt prune runs/unirl/first --keep 1 --yes")  # fmt: skip


def run(argv: list[str], session: Session) -> int:
    return run_verb("ckpt", argv, {"ls": list_all, "verify": verify, "show": show, "prune": prune}, EXAMPLES)


def list_all(argv: Sequence[str]) -> int:
    parser = Parser("ckpt ls", "List the checkpoints of a run, newest first, each verified.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory, or its checkpoints folder")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    store = _store(options.run)
    rows = [(result, checkpoint.verify(result.path)) for result in store.checkpoints()]
    if options.json:
        listed = [{"path": str(result.path), "step": result.step, "problems": wrong} for result, wrong in rows]
        print(json.dumps(listed, indent=1))
    for result, wrong in [] if options.json else rows:
        size = sum(path.stat().st_size for path in result.path.rglob("*") if path.is_file())
        print_inert(f"{result.path.name}  step {result.step:<6} {size / 1e6:9.1f} MB  {'; '.join(wrong) or 'valid'}")
    return 0


def verify(argv: Sequence[str]) -> int:
    parser = Parser("ckpt verify", "Compare every file of a checkpoint with its manifest.", EXAMPLES)
    parser.add_argument("checkpoint", metavar="PATH", help="a checkpoint folder")
    parser.option("--deep", action="store_true", help="read every tensor, too: all values are finite, steps agree")
    parser.option("--key", metavar="SOURCE", help="check the signature: env:NAME, or a file with mode 600")
    options = parser.parse(argv)
    path = existing(options.checkpoint)
    key = None if options.key is None else read_key(options.key, "--key")
    wrong = checkpoint.reasons_against(path, healthy=options.deep, key=key)
    if wrong:
        raise CheckpointError(f"{path} is damaged or incomplete:" + "".join(f"\n  {line}" for line in wrong))
    checked = ["every tensor read"] if options.deep else []
    if key is not None:
        checked.append("signature valid")
    elif (path / SIGNATURE).exists():
        checked.append("signature not checked (--key)")
    print_inert(f"{path}: {', '.join(['valid', *checked])}")
    return 0


def show(argv: Sequence[str]) -> int:
    parser = Parser("ckpt show", "Print the manifest of a checkpoint: step, versions, files.", EXAMPLES)
    parser.add_argument("checkpoint", metavar="PATH", help="a checkpoint folder")
    path = existing(parser.parse(argv).checkpoint)
    if wrong := checkpoint.verify(path):
        raise CheckpointError(f"{path} cannot be shown: {wrong[0]}. unirl ckpt verify {path} lists all problems")
    print(json.dumps(asdict(read_manifest(path)), indent=1))
    return 0


def prune(argv: Sequence[str]) -> int:
    parser = Parser("ckpt prune", "Delete the oldest checkpoints of a run.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory, or its checkpoints folder")
    parser.option("--keep", type=int, default=3, help="how many remain (default 3)")
    parser.option("--yes", action="store_true", help="do not ask")
    options = parser.parse(argv)
    if options.keep < 1:
        raise InvalidValueError(f"--keep must be >= 1, got {options.keep}: the last checkpoint is never deleted")
    store = _store(options.run, keep=options.keep)
    doomed = store.beyond_keep()
    if not doomed:
        print_inert(f"{store.directory}: nothing to delete with --keep {options.keep}")
    elif options.yes or _agreed(doomed):
        store.prune()
        print_inert(f"{store.directory}: deleted {', '.join(result.path.name for result in doomed)}")
    return 0


def _store(run: str, keep: int = 3) -> CheckpointStore:
    folder = existing(run)
    inner = folder / "checkpoints"
    return CheckpointStore(inner if inner.is_dir() else folder, keep=keep)


def _agreed(doomed: Sequence[Checkpoint]) -> bool:
    names = ", ".join(result.path.name for result in doomed)
    if not sys.stdin.isatty():
        raise ArgumentError(f"this would delete {names}; add --yes to do it")
    return input(f"delete {names}? [y/N] ").strip().lower() == "y"

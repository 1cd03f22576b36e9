"""`unirl doctor`: one OK or FAIL line per requirement of a run."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.env import installed, memory_gib
from unirl.config.dependencies import check_ray_address
from unirl.config.errors import UniRLError, report
from unirl.config.failures import Session

EXAMPLES = ("unirl doctor", "unirl doctor --recipe diffusion/sd3_trainside", "unirl doctor --json")


OLDEST_RAY = (2, 54)


class Unfit(Exception):
    """A failed check. The message names the problem and the way out."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser("doctor", "Check that this machine can run UniRL; exit status 3 if it cannot.", EXAMPLES)
    parser.option("--recipe", metavar="R", help="also check this recipe")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    checks = dict(CHECKS)
    if options.recipe:
        checks[f"recipe {options.recipe}"] = lambda: _recipe(options.recipe)
    results = [_result(name, check) for name, check in checks.items()]
    if options.json:
        print(json.dumps([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in results], indent=1))
    for name, ok, detail in [] if options.json else results:
        print(f"{'OK  ' if ok else 'FAIL'}  {name}: {detail}")
    return 0 if all(ok for _, ok, _ in results) else 3


def _result(name: str, check: Callable[[], str]) -> tuple[str, bool, str]:
    try:
        return name, True, check()
    except Unfit as error:
        return name, False, str(error)


def _python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise Unfit(f"{version}; UniRL needs 3.11 to 3.13. Create a .venv with one of these, as bash test.sh does")
    return version


def _packages() -> str:
    names = _required(requires("unirl") or [])
    missing = [name for name in names if installed(name) is None]
    if missing:
        raise Unfit(f"missing: {', '.join(missing)}. pip install -c constraints.txt -e .   installs them")
    return f"{len(names)} required packages are installed"


def _required(lines: Sequence[str]) -> list[str]:
    """The package names of requirement lines without an extra."""
    return [
        line.split(";")[0].split(">")[0].split("<")[0].split("=")[0].strip() for line in lines if "extra ==" not in line
    ]


def _torch() -> str:
    if installed("torch") is None:
        raise Unfit("absent. pip install -c constraints.txt torch")
    import torch

    _check_torchvision()
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if float(product.sum()) != 512.0:
        raise Unfit(f"8x8 ones times ones sums to {float(product.sum())}, not 512: this build of torch is broken")
    return f"{torch.__version__}, {torch.cuda.device_count() or 'no'} GPU, {torch.get_num_threads()} CPU threads"


def _check_torchvision() -> None:
    """UniRL does not need torchvision, but transformers imports it if it is installed."""
    if installed("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise Unfit(
            f"torchvision does not work with this torch ({error}), so transformers fails to import it. "
            "Uninstall it: pip uninstall torchvision"
        ) from error


def _ray() -> str:
    version = installed("ray")
    if version is None:
        raise Unfit("absent, and runtime=ray needs it. pip install -c constraints.txt ray")
    if tuple(map(int, version.split(".")[:2])) < OLDEST_RAY:
        raise Unfit(f"{version}; versions before 2.54 accept commands from anyone (CVE-2026-27482). Upgrade it")
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        check_ray_address(address)
    except UniRLError as error:
        raise Unfit(str(error)) from error
    return f"{version}, {f'RAY_ADDRESS={address}' if address else 'started by the run itself'}"


def _memory() -> str:
    if memory_gib() < 3:
        raise Unfit(f"{memory_gib():.1f} GiB; the quick start needs about 3 GiB")
    return f"{memory_gib():.1f} GiB, {os.cpu_count()} CPUs"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 1:
        raise Unfit(f"{free:.1f} GiB free in {Path.cwd()}; checkpoints need at least 1 GiB. Free some, or set run.dir")
    return f"{free:.1f} GiB free here"


def _writable() -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()):
            return f"runs can be written to {Path.cwd()}"
    except OSError as error:
        raise Unfit(
            f"{Path.cwd()} is not writable ({error.strerror}). Change to another directory, or set run.dir=FOLDER"
        ) from error


def _recipes() -> str:
    from unirl.config.recipe_files import list_recipes, search_path

    recipes = list_recipes()
    if not recipes:
        raise Unfit("no examples/ folder with recipes was found. Run from a checkout")
    return f"{len(recipes)} in {search_path()[0]}"


def _recipe(name: str) -> str:
    from unirl.cli.check import checked

    try:
        checked(name, ())
    except UniRLError as error:
        raise Unfit(report(error)) from error
    return "valid"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "ray": _ray,
    "memory": _memory,
    "disk": _disk,
    "folder": _writable,
    "recipes": _recipes,
}

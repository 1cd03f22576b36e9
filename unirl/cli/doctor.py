"""`unirl doctor`: one line per requirement of a run: OK, FAIL, or NOTE if it cannot tell, or if a run would be slow."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.bench.probe import main_memory_gib
from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.engine_install import environment_named
from unirl.cli.env import installed
from unirl.cli.start import shown_start
from unirl.config.dependencies import check_ray_address
from unirl.config.errors import NotFoundError, UniRLError, report
from unirl.config.failures import Session

if TYPE_CHECKING:
    from unirl.config.load import Recipe
    from unirl.config.recipe import RecipeConfig
    from unirl.plan.sizes import RecipeSizes
    from unirl.rollout.engine.environments import EngineEnvironment

EXAMPLES = (
    "unirl doctor",
    "unirl doctor diffusion/sd3_trainside num_devices=8",
    "unirl doctor --engine sglang",
    "unirl doctor --json",
)
OLDEST_RAY = (2, 54)
UNKNOWN = "not known"
"""The first words of a detail, if the check could neither confirm nor refuse."""
SLOW = "slow"
"""The first word of a detail about a run that works and takes very long."""


class Unfit(Exception):
    """A failed check. The message names the problem and the way out."""


def run(argv: list[str], session: Session) -> int:
    about = "Check that this machine can run UniRL, or a recipe; exit status 3 if it cannot."
    parser = recipe_parser("doctor", about, EXAMPLES)
    parser.usage = "unirl doctor [RECIPE [key=value ...]] [options]"
    parser.option("--json", action="store_true", help="as JSON")
    parser.option("--engine", metavar="NAME", help="also check the environment of an engine; `unirl engines list`")
    arguments = parse_recipe(parser, argv, default="")
    with shown_start(Session(), "checking"):
        checks = CHECKS | _device_checks()
        if arguments.options.engine is not None:
            checks |= _engine_checks(arguments.options.engine)
        if arguments.recipe:
            checks |= _recipe_checks(arguments.recipe, arguments.overrides)
        results = [_result(name, check) for name, check in checks.items()]
    if arguments.options.json:
        print(json.dumps([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in results], indent=1))
    for name, ok, detail in [] if arguments.options.json else results:
        print(f"{'FAIL' if not ok else 'NOTE' if detail.startswith((UNKNOWN, SLOW)) else 'OK  '}  {name}: {detail}")
    return 0 if all(ok for _, ok, _ in results) else 3


def _result(name: str, check: Callable[[], str]) -> tuple[str, bool, str]:
    try:
        return name, True, check()
    except Unfit as error:
        return name, False, str(error)
    except UniRLError as error:
        return name, False, report(error)


def _python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise Unfit(f"{version}; UniRL needs 3.11 to 3.13. Create a .venv with one of these, as bash test.sh does")
    return version


def _packages() -> str:
    names = [re.split("[;<>=]", line)[0].strip() for line in requires("unirl") or [] if "extra ==" not in line]
    missing = [name for name in names if installed(name) is None]
    if missing:
        raise Unfit(f"missing: {', '.join(missing)}. pip install -c constraints.txt -e .   installs them")
    return f"{len(names)} required packages are installed"


def _torch() -> str:
    if installed("torch") is None:
        raise Unfit("absent. pip install -c constraints.txt torch")
    import torch

    from unirl.models.chunks import rows_are_independent
    from unirl.types.device import num_accelerators, unusable_gpu

    _check_torchvision()
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if float(product.sum()) != 512.0:
        raise Unfit(f"8x8 ones times ones sums to {float(product.sum())}, not 512: this build of torch is broken")
    if (why := unusable_gpu()) is not None:
        raise Unfit(why)
    bits = "the same bits" if rows_are_independent() else "other bits (last digits)"
    return (
        f"{torch.__version__}, {num_accelerators() or 'no'} GPU, {torch.get_num_threads()} CPU threads; "
        f"a sample has {bits} in a forward batch of another size on this CPU"
    )


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


def _drawing() -> str:
    """Tries the libraries of OpenGL with which MuJoCo draws episodes."""
    if installed("mujoco") is None:
        return "MuJoCo is not installed, which only environments need that use it"
    from unirl.envs.drawing import BACK_ENDS, VARIABLE, works

    given = os.environ.get(VARIABLE)
    if given and works(given):
        return f"MuJoCo draws with {VARIABLE}={given}"
    others = [name for name in BACK_ENDS if name != given and works(name)]
    if given:
        raise Unfit(
            f"MuJoCo cannot draw with {VARIABLE}={given}. "
            + (f"Set {VARIABLE}={others[0]}" if others else f"Unset {VARIABLE}: then episodes have no videos")
        )
    if others:
        return f"MuJoCo draws with {VARIABLE}={others[0]}, which a run chooses by itself"
    return (
        f"{UNKNOWN} how to draw episodes of MuJoCo: neither {VARIABLE}=egl nor {VARIABLE}=osmesa works. Install "
        "libegl1 with a driver, or libosmesa6; without, episodes have no videos"
    )


def _memory() -> str:
    if main_memory_gib() < 3:
        raise Unfit(f"{main_memory_gib():.1f} GiB; the quick start needs about 3 GiB")
    return f"{main_memory_gib():.1f} GiB, {os.cpu_count()} CPUs"


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


def _device_checks() -> dict[str, Callable[[], str]]:
    """A line for each accelerator, and one for the connections between them."""
    if installed("torch") is None:
        return {}
    from unirl.types.device import num_accelerators

    count = num_accelerators()
    lines: dict[str, Callable[[], str]] = {f"gpu {index}": partial(_gpu, index) for index in range(count)}
    return lines | {"gpus": _gpus} if count else {}


def _gpu(index: int) -> str:
    from unirl.types.device import accelerator, device_kind, free_gib

    kind, free = device_kind(accelerator(index)), free_gib(accelerator(index))
    return f"{kind}" + ("" if free is None else f"; {free:.1f} GiB free")


def _gpus() -> str:
    from unirl.types.device import has_expandable_segments, nccl_version, num_accelerators, without_peer_access

    apart = without_peer_access()
    pairs = ", ".join(f"{one}-{other}" for one, other in apart if one < other)
    peers = f"no peer access between {pairs}: copies pass through the host" if apart else "peer access between all"
    segments = "on" if has_expandable_segments() else "off (PYTORCH_ALLOC_CONF=expandable_segments:True)"
    nccl = nccl_version()
    if nccl is None and num_accelerators() > 1:
        raise Unfit("this torch has no NCCL, without which several GPUs cannot train together. Install a CUDA build")
    return f"NCCL {nccl or 'absent'}, {peers}, expandable segments {segments}"


def _engine_checks(name: str) -> dict[str, Callable[[], str]]:
    """A line about the environment of an engine. Raises ArgumentError for an unknown name."""
    return {f"engine {name}": partial(_engine, environment_named(name))}


def _engine(environment: EngineEnvironment) -> str:
    from unirl.rollout.engine.environments import described

    python = environment.python_for(None)
    found = described(python, environment)
    if found.package is None:
        raise Unfit(
            f"{python} has no {environment.distribution}. Install it: unirl engines install {environment.name} --again"
        )
    if found.package != environment.version:
        raise Unfit(
            f"{environment.distribution} {found.package}, and the messages were compared with {environment.version}. "
            f"Install that one: unirl engines install {environment.name} --again"
        )
    text = f"{environment.distribution} {found.package}, Python {found.python}, torch {found.torch} in {python}"
    if found.gpus == 0:
        raise Unfit(f"{text}, which sees no GPU. The server needs one, and a driver that this torch can use")
    return f"{text}; {found.gpus} GPU"


def _recipe_checks(name: str, overrides: Sequence[str]) -> dict[str, Callable[[], str]]:
    """Lines for a recipe. The others are left out if it is not valid."""
    from unirl.cli.check import checked
    from unirl.plan.sizes import sizes_of_policies

    try:
        recipe = checked(name, overrides)
    except UniRLError as error:
        problem = report(error)

        def invalid() -> str:
            raise Unfit(problem)

        return {f"recipe {name}": invalid}
    checks: dict[str, Callable[[], str]] = {f"recipe {name}": lambda: "valid"}
    policies = recipe.policies
    checks["reward"] = partial(_reward, recipe.config)
    checks["engine"] = partial(_recipe_engines, recipe)
    sizes = sizes_of_policies(recipe)
    for policy, config in policies.items():
        checks[f"{policy} room".lstrip()] = partial(_room, sizes[policy], policy)
        checks[f"{policy} download".lstrip()] = partial(_download, config)
    return checks


def _reward(config: RecipeConfig) -> str:
    """Asks the scorers whether their packages and servers are there."""
    from unirl.trainer.assemble import check_reward

    check_reward(config)
    return "no package or server that it needs is missing"


def _recipe_engines(recipe: Recipe) -> str:
    """Looks for the environments of the engines' servers, and for the libraries that policies act in."""
    from unirl.plan.machine import check_engines

    check_engines(recipe)
    return "no environment of a server or library of a simulator that it needs is missing"


def _room(sizes: RecipeSizes, policy: str = "") -> str:
    """Compares the planned memory of a run with the memory of this machine.

    Args:
        policy: the policy that the sizes are about, in a recipe of several.
    """
    from unirl.config.recipe import keys_of_policy
    from unirl.plan.machine import check_machine, is_elsewhere, largest_device, peak_of
    from unirl.plan.preflight import of_policy
    from unirl.plan.threads import crowded
    from unirl.types.device import num_accelerators

    warnings: list[str] = []
    config = sizes.config
    with of_policy(policy, config):
        check_machine(sizes, warnings.append)
    if warnings:
        return keys_of_policy("; ".join(warnings), config)
    has_gpu = num_accelerators() and not is_elsewhere(config)
    peak = peak_of(sizes, memory_gib=largest_device().memory_gib if has_gpu else None)
    if peak is None:
        return f"{UNKNOWN}: the plan has no sizes for this model"
    needs = f"the plan's peak is {peak.gib:.1f} GiB on a device (at {peak.at}, estimated)"
    if is_elsewhere(config):
        return f"{needs}; the devices are those of the cluster at RAY_ADDRESS"
    if num_accelerators():
        return f"{needs}, on {config.num_devices} x {largest_device()}"
    count = 1 if config.runtime_in_use == "local" else config.devices_on_node
    processes = f"{count} process{'es' * (count > 1)} on the CPU, with {main_memory_gib():.1f} GiB in all"
    if peak.gib * count > main_memory_gib():
        raise Unfit(
            f"{needs}, with micro-batches of the smallest size, and this machine has no GPU: {processes}. Use GPUs "
            "(`unirl fit` has the figures for each), or scale=toy"
        )
    why = crowded(config)
    return f"{needs}, in {processes}" if why is None else f"{SLOW}: {why}; {needs}"


def _download(config: RecipeConfig) -> str:
    """The files of the model that are not on this machine yet."""
    from unirl.config.recipe import keys_of_policy
    from unirl.models.loading import hub

    path = config.model_path
    if path is None or Path(path).expanduser().is_dir() or not hub.HUB_ID.fullmatch(path):
        return "nothing: the model is on this machine"
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        sizes = hub.files_to_fetch(path, config.model_revision)
    except NotFoundError as error:
        return f"{UNKNOWN}: {keys_of_policy(str(error), config)}"
    cached = {
        name for name in sizes if isinstance(try_to_load_from_cache(path, name, revision=config.model_revision), str)
    }
    missing = {name: size for name, size in sizes.items() if name not in cached}
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())).free
    num_bytes = sum(missing.values())
    text = f"{num_bytes} bytes ({num_bytes / 1e9:.1f} GB) in {len(missing)} of {len(sizes)} files of {path}"
    if num_bytes > free:
        raise Unfit(f"{text}, and {free / 1e9:.1f} GB are free in {cache}. Set HF_HOME to another disk")
    return f"{text}, to {cache}" if missing else f"nothing: {path} is in {cache}"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "ray": _ray,
    "memory": _memory,
    "disk": _disk,
    "folder": _writable,
    "recipes": _recipes,
    "drawing": _drawing,
}

"""`unirl engines list` and `unirl engines install`: the Python environments of rollout engines."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from unirl.cli.arguments import Parser
from unirl.config.errors import ArgumentError, DependencyError, InvalidValueError, did_you_mean
from unirl.rollout.engine.environments import (
    ENVIRONMENTS,
    EngineEnvironment,
    described,
    environments_folder,
)

LIST_EXAMPLES = ("unirl engines list",)
INSTALL_EXAMPLES = (
    "unirl engines install sglang",
    "unirl engines install vllm_omni --python python3.11",
    "UNIRL_ENGINES=/big/disk unirl engines install sglang",
    "unirl engines install sglang --dry-run",
)


def show(argv: Sequence[str]) -> int:
    parser = Parser("engines list", "List the environments of engines, and whether they are installed.", LIST_EXAMPLES)
    parser.parse(argv)
    print(f"environments are installed into {environments_folder()} (UNIRL_ENGINES)")
    for each in ENVIRONMENTS.values():
        state = str(each.folder) if each.python.exists() else f"not installed: unirl engines install {each.name}"
        print(f"  {each.name:<10} {each.distribution:<10} {each.version:<8} {state}")
    return 0


def install(argv: Sequence[str]) -> int:
    about = "Install the server of an engine into a Python environment of its own. It takes minutes and 5 to 10 GB."
    parser = Parser("engines install", about, INSTALL_EXAMPLES)
    parser.add_argument("name", help=f"{' or '.join(ENVIRONMENTS)}")
    parser.option("--python", default=sys.executable, help="the Python of the environment (default: that of UniRL)")
    parser.option("--again", action="store_true", help="remove the environment first")
    parser.option("--dry-run", action="store_true", help="print the commands only")
    options = parser.parse(argv)
    environment = environment_named(options.name)
    python = shutil.which(options.python)
    if python is None:
        raise InvalidValueError(f"--python {options.python} is no program. Give a Python, such as python3.11")
    commands = environment.install_commands(python, shutil.which("uv"))
    if options.dry_run:
        print("\n".join(shlex.join(command) for command in commands))
        return 0
    if options.again:
        shutil.rmtree(environment.folder, ignore_errors=True)
    if environment.folder.exists():
        raise ArgumentError(
            f"{environment.folder} exists. `unirl doctor --engine {environment.name}` says whether it works; "
            f"`unirl engines install {environment.name} --again` replaces it"
        )
    for command in commands:
        print(f"+ {shlex.join(command)}", flush=True)
        status = subprocess.run(command).returncode
        if status != 0:
            shutil.rmtree(environment.folder, ignore_errors=True)
            raise DependencyError(
                f"{command[0]} ended with exit status {status}, and its last lines say why. Nothing was installed. The "
                f"packages are locked for Linux x86_64 and Python 3.11: choose one with --python"
            )
    found = described(str(environment.python), environment)
    print(f"{environment.distribution} {found.package} with torch {found.torch} is in {environment.folder}")
    print(f"engines of {environment.name} use it from now on. Check it: unirl doctor --engine {environment.name}")
    return 0


def environment_named(name: str) -> EngineEnvironment:
    """Raises ArgumentError for an unknown name."""
    if name not in ENVIRONMENTS:
        known = ", ".join(ENVIRONMENTS)
        raise ArgumentError(
            f"no environment is called {name}.{did_you_mean(name, ENVIRONMENTS)} There is: {known}. "
            "That of rollout=sglang_diffusion is sglang"
        )
    return ENVIRONMENTS[name]

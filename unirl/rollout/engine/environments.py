"""Python environments of rollout engines, whose packages conflict with those of UniRL: install, find, check.

    requirements/NAME.txt --`unirl engines install NAME`--> FOLDER/NAME/bin/python --> the server of an engine

FOLDER is $UNIRL_ENGINES, or ~/.cache/unirl/engines. An engine whose `python_executable` is absent uses the environment
that is there, and otherwise the Python that runs UniRL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.config.dependencies import is_installed
from unirl.config.errors import DependencyError

ASK = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
import torch
mismatch = None
if importlib.util.find_spec("torchvision"):
    try:
        import torchvision
    except Exception as error:
        mismatch = f"torchvision {version('torchvision')} does not load beside torch {torch.__version__} ({error})"
print(json.dumps({"python": sys.version.split()[0], "package": version(sys.argv[1]), "torch": torch.__version__,
                  "gpus": torch.cuda.device_count(), "mismatch": mismatch}))
"""
"""The program that an environment runs to describe itself."""


@dataclass(frozen=True)
class EngineEnvironment:
    """The environment of one or more engines."""

    name: str
    distribution: str
    """The package of the server, by its name on the index."""
    module: str
    """The package of the server, by the name of its import."""
    version: str
    """The version that the engine's messages were compared with."""

    @property
    def requirements(self) -> Path:
        """The locked packages."""
        return Path(__file__).parent / "requirements" / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        return environments_folder() / self.name

    @property
    def python(self) -> Path:
        """The Python of the environment, if it is installed."""
        return self.folder / "bin" / "python"

    def python_for(self, setting: str | None) -> str:
        """The Python that starts a server.

        Args:
            setting: `rollout.python_executable`.

        Raises:
            DependencyError: 3001, if there is none.
        """
        if setting is not None:
            if shutil.which(setting) is None:
                raise DependencyError(
                    f"rollout.python_executable={setting} is no program. Give the Python of an environment with "
                    f"{self.distribution}, or leave the key out after: unirl engines install {self.name}"
                )
            return setting
        if self.python.exists():
            return str(self.python)
        if is_installed(self.module):
            return sys.executable
        raise DependencyError(
            f"{self.distribution} is not installed: {self.folder} does not exist. Install it: unirl engines install "
            f"{self.name}. Or name the Python of an environment that has it: rollout.python_executable=ENV/bin/python. "
            "To try a recipe without it, with a fake server and random weights: scale=toy"
        )

    def install_commands(self, base_python: str, uv: str | None) -> list[list[str]]:
        """The commands that make the environment.

        Args:
            base_python: the Python of the environment.
            uv: the path of uv, which is faster than pip. None: it is not installed.
        """
        python, folder = str(self.python), str(self.folder)
        if uv is not None:
            return [
                [uv, "venv", "--python", base_python, folder],
                [uv, "pip", "install", "--python", python, "-r", str(self.requirements)],
            ]
        return [
            [base_python, "-m", "venv", folder],
            [python, "-m", "pip", "install", "-r", str(self.requirements)],
        ]


ENVIRONMENTS: Mapping[str, EngineEnvironment] = {
    each.name: each
    for each in (
        EngineEnvironment("sglang", "sglang", "sglang", "0.5.23"),
        EngineEnvironment("vllm", "vllm", "vllm", "0.33.0"),
        EngineEnvironment("vllm_omni", "vllm-omni", "vllm_omni", "0.30.0"),
    )
}


def environments_folder() -> Path:
    """The folder of all environments."""
    chosen = os.environ.get("UNIRL_ENGINES")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unirl" / "engines"


@dataclass(frozen=True)
class Installed:
    """The contents of an environment."""

    python: str
    package: str | None
    """The version of the server's package. None: absent."""
    torch: str
    gpus: int
    """The number of GPUs that its torch can use."""
    mismatch: str | None = None
    """Why two builds of its packages do not work together. None: they do."""


def described(python: str, environment: EngineEnvironment) -> Installed:
    """Ask an environment about its contents. Raises DependencyError (3001) if its torch or torchvision do not load."""
    words = [python, "-c", ASK, environment.distribution]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise DependencyError(
            f"{python} does not work: {reason}. Install the environment anew: unirl engines install "
            f"{environment.name} --again"
        )
    found = Installed(**json.loads(answer.stdout.splitlines()[-1]))
    if found.mismatch is not None:
        raise DependencyError(
            f"{python} does not work: {found.mismatch}. The installer took another build of torch than that of the "
            "index, as with find-links or an index of CPU builds in its settings (`pip config list` shows them). "
            "Install the build that fits: "
            f"{python} -m pip install --no-deps torch==={found.torch.partition('+')[0]}"
        )
    return found

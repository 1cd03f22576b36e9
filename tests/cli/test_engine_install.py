"""Environments of engines: what installs them, which Python starts a server, and what is said when there is none."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from unirl.cli import engine_install
from unirl.cli.doctor import Unfit, _engine
from unirl.cli.main import main
from unirl.config.errors import DependencyError
from unirl.rollout.engine.environments import ENVIRONMENTS, EngineEnvironment, described


@pytest.fixture
def environment(tmp_path, monkeypatch) -> EngineEnvironment:
    """An environment of this very package, which is not installed yet, in an empty folder of environments."""
    monkeypatch.setenv("UNIRL_ENGINES", str(tmp_path / "engines"))
    own = EngineEnvironment("own", "unirl", "no_such_module", version("unirl"))
    monkeypatch.setattr(engine_install, "ENVIRONMENTS", {"own": own})
    return own


@pytest.mark.parametrize("each", ENVIRONMENTS.values(), ids=list(ENVIRONMENTS))
def test_the_locked_packages_have_the_version_that_was_compared(each: EngineEnvironment) -> None:
    lines = [line for line in each.requirements.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\-]+(\[[\w,\-]+\])?==[^\s]+", line) for line in lines)
    assert f"{each.distribution}=={each.version}" in lines and any(line.startswith("torch==") for line in lines)


def test_the_python_is_the_chosen_one_the_installed_one_or_none(environment) -> None:
    assert environment.python_for(sys.executable) == sys.executable
    with pytest.raises(DependencyError, match=r"rollout.python_executable=/nowhere/python is no program"):
        environment.python_for("/nowhere/python")
    with pytest.raises(DependencyError, match="unirl engines install own"):
        environment.python_for(None)
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    assert environment.python_for(None) == str(environment.python)


def test_an_environment_describes_itself(environment) -> None:
    found = described(sys.executable, environment)
    assert found.package == version("unirl") and found.python == sys.version.split()[0]
    with pytest.raises(DependencyError, match=r"does not work: .*No module named 'torch'"):
        described_without_torch(environment)


def described_without_torch(environment: EngineEnvironment) -> None:
    wrapper = environment.python
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    wrapper.chmod(0o755)
    described(str(wrapper), environment)


def test_builds_that_do_not_fit_are_named_with_the_command_that_installs_one_that_does(environment, tmp_path) -> None:
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    with pytest.raises(DependencyError) as refused:
        described(str(wrapper), environment)
    text, ours = str(refused.value), version("torch")
    assert f"does not load beside torch {ours} (operator torchvision::nms does not exist)" in text
    assert text.endswith(f"{wrapper} -m pip install --no-deps torch==={ours.partition('+')[0]}")


def test_doctor_names_another_version_and_a_missing_gpu(environment, monkeypatch) -> None:
    monkeypatch.setattr(EngineEnvironment, "python_for", lambda self, setting: sys.executable)
    with pytest.raises(Unfit, match="which sees no GPU"):
        _engine(environment)
    with pytest.raises(Unfit, match=r"the messages were compared with 9\.9"):
        _engine(EngineEnvironment("own", "unirl", "unirl", "9.9"))
    with pytest.raises(Unfit, match="has no absent"):
        _engine(EngineEnvironment("own", "absent", "absent", "1.0"))


def test_an_installation_that_fails_leaves_nothing_behind(environment, monkeypatch, tmp_path, capfd) -> None:
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(f"{tmp_path / 'no-such-package'}\n")
    monkeypatch.setattr(EngineEnvironment, "requirements", wrong)
    monkeypatch.setattr(engine_install.shutil, "which", lambda name: None if name == "uv" else sys.executable)
    assert main(["engines", "install", "own"]) == 3
    out, err = capfd.readouterr()
    assert "pip install -r" in out and "error[3001]" in err and "Nothing was installed" in err
    assert not environment.folder.exists()


def test_an_environment_that_exists_is_not_overwritten(environment, capfd) -> None:
    environment.folder.mkdir(parents=True)
    assert main(["engines", "install", "own"]) == 2
    assert "--again" in capfd.readouterr().err
    assert main(["engines", "install", "onw"]) == 2
    assert "Did you mean 'own'?" in capfd.readouterr().err


def test_the_commands_of_pip_and_of_uv(environment, capsys) -> None:
    assert main(["engines", "install", "own", "--dry-run", "--python", sys.executable]) == 0
    assert str(environment.folder) in capsys.readouterr().out
    requirements = str(environment.requirements)
    [venv, pip] = environment.install_commands("python3", None)
    assert venv[:3] == ["python3", "-m", "venv"] and pip[-2:] == ["-r", requirements]
    [venv, pip] = environment.install_commands("python3", "/bin/uv")
    assert venv[:2] == ["/bin/uv", "venv"] and Path(pip[pip.index("--python") + 1]) == environment.python

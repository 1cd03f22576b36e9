"""A recipe file cannot allow code of its own: the user does, and until then nothing of it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unirl.cli.main import main
from unirl.config import trust
from unirl.config.errors import UnsafeTargetError
from unirl.config.load import load

NAME = "strangers_pack"
RECIPE = f"""\
defaults: [diffusion/quickstart, _self_]
plugins: [{NAME}]
reward: {{backend: {{_target_: {NAME}.Scorer}}}}
"""
PACKAGE = """\
from pathlib import Path

from unirl.reward.base import RewardScorer

Path(__file__).with_name("imported").touch()


class Scorer(RewardScorer):
    reads = ("images",)

    def score(self, request): ...
"""


@pytest.fixture
def strangers(tmp_path, monkeypatch) -> Path:
    """A folder with a recipe and the package that it names, and a home without settings."""
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    trust.forget()
    yield tmp_path
    trust.forget()
    sys.modules.pop(NAME, None)


def was_imported(folder: Path) -> bool:
    return (folder / NAME / "imported").exists()


@pytest.mark.parametrize("command", [["check"], ["plan"], ["config", "show"], ["train"], ["train", "--dry-run"]])
def test_a_command_refuses_a_recipe_that_names_its_own_code_and_imports_nothing_of_it(strangers, capsys, command):
    verb, *options = command if command[0] != "config" else [" ".join(command)]
    assert main([*verb.split(), "./mine.yaml", *options]) == 2
    shown = capsys.readouterr().err
    assert "error[2030]" in shown and "(mine.yaml:2)" in shown
    for way_out in (f"plugins=[{NAME}]", f"{trust.VARIABLE}={NAME}", str(trust.user_file())):
        assert way_out in shown
    assert not was_imported(strangers)


@pytest.mark.parametrize("overrides", [[], [f"plugins=[{NAME}]"]])
def test_printing_a_configuration_imports_nothing_of_a_plugin(strangers, capsys, overrides):
    assert main(["train", "./mine.yaml", "--cfg", "job", *overrides]) == 0
    shown = capsys.readouterr()
    assert f"_target_: {NAME}.Scorer" in shown.out and f"a check imports {NAME}" in shown.err
    assert not was_imported(strangers)


def allow_by_command_line(folder: Path, monkeypatch) -> list[str]:
    return [f"plugins=[{NAME}]"]


def allow_by_environment(folder: Path, monkeypatch) -> list[str]:
    monkeypatch.setenv(trust.VARIABLE, f"other,{NAME}")
    return []


def allow_by_file(folder: Path, monkeypatch) -> list[str]:
    trust.user_file().parent.mkdir(parents=True)
    trust.user_file().write_text(f"# mine\n{NAME}  # rewards\n")
    return []


@pytest.mark.parametrize("allow", [allow_by_command_line, allow_by_environment, allow_by_file])
def test_the_user_allows_a_package_in_three_ways(strangers, monkeypatch, allow):
    recipe = load(str(strangers / "mine.yaml"), allow(strangers, monkeypatch))
    assert recipe.value("reward.backend._target_") == f"{NAME}.Scorer" and was_imported(strangers)


def test_a_package_that_was_typed_once_serves_the_recipes_that_the_same_command_reads_back(strangers):
    load(str(strangers / "mine.yaml"), [f"plugins=[{NAME}]"])
    load(str(strangers / "mine.yaml"))
    trust.forget()
    with pytest.raises(UnsafeTargetError):
        load(str(strangers / "mine.yaml"))


@pytest.mark.parametrize(("allowed", "needed"), [("leash", "leash.rewards"), ("leash", "leash")])
def test_an_allowed_package_covers_its_modules(allowed, needed):
    assert trust.trusted([allowed], [needed], "")[0] == allowed
    trust.forget()


def test_a_part_of_a_name_allows_nothing(monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, "lea")
    with pytest.raises(UnsafeTargetError, match="needs code of leash"):
        trust.trusted([], ["leash"], "")

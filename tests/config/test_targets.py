"""What a `_target_` may name, and that nothing else is even imported."""

import sys

import pytest

from unirl.config.errors import ConfigError, DependencyError
from unirl.config.targets import check_plugins, find_target

HERE = "tests.config.stand_ins"


def refused(dotted, plugins=("tests",)):
    with pytest.raises(ConfigError) as caught:
        find_target(dotted, "algorithm", plugins)
    return caught.value


@pytest.mark.parametrize(
    "dotted",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "subprocess.Popen",
        "posix.system",
        "importlib.import_module",
        "torch.load",
        "hydra.utils.instantiate",
        "unirl_evil.Thing",
        "unirl",
        "unirl.config",
        "unirl.config.recipe_files.yaml.load",
        "unirl.config.merge.fold",
        "unirl.config.recipe_files.Path",
        "unirl.plan.preflight.shutil.rmtree",
        "unirl.config.compose.os.system",
        "unirl.config.compose.ComposedConfig.text",
        "unirl.config.recipe_files.RecipeFile.card",
        "unirl.config.recipe_files.RecipeFile.__init__",
        "unirl.config.recipe_files.RecipeFile.__class__.__bases__",
        "unirl.config.__init__.X",
        f"{HERE}.system",
        f"{HERE}.OrderedDict",
        f"{HERE}.OrderedDict.fromkeys",
        f"{HERE}.function",
        f"{HERE}.Worker.not_for_recipes",
        f"{HERE}.Worker.nor_this",
        f"{HERE}.Square.side",
        "..os.system",
        "unirl..config",
        "unirl.config.recipe_files.RecipeFile ",
        "unirl/config/recipe_files.RecipeFile",
        "",
        "eval",
    ],
)
def test_hostile_and_foreign_targets_are_refused(dotted):
    assert refused(dotted).code == 2030


@pytest.mark.parametrize("value", [3, None, ["unirl.config.recipe_files.RecipeFile"], {"a": 1}, True])
def test_a_target_that_is_no_text_is_refused(value):
    assert refused(value).code == 2030


@pytest.mark.parametrize("package", ["evil_pack", "unirl_evil", "tests2"])
def test_a_refused_package_is_not_imported(package, tmp_path, monkeypatch):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(f"{package}.Thing")
    assert f"plugins=[{package}]" in str(error)
    assert package not in sys.modules


def test_a_package_that_the_user_names_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "my_pack").mkdir()
    (tmp_path / "my_pack" / "__init__.py").write_text("class Thing:\n    def __init__(self, *, a: int = 1): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_target("my_pack.Thing", "reward", ("my_pack",)).__name__ == "Thing"


@pytest.mark.parametrize("name", ["os", "subprocess", "builtins", "importlib", "os.path", "a b", "..", ""])
def test_the_standard_library_cannot_be_allowed(name):
    with pytest.raises(ConfigError) as caught:
        check_plugins((name,))
    assert caught.value.code == 2030


def test_a_plugin_that_is_not_there_is_refused_with_the_nearest_of_this_folder(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match=r"plugins=\[my_rewrad\]: .* 'my_rewrad'\. Did you mean 'my_reward'\?"):
        check_plugins(("my_rewrad",))
    with pytest.raises(DependencyError, match=r"'absent_pack'\. Run from its folder"):
        check_plugins(("absent_pack.rewards",))
    check_plugins(("my_reward",))
    assert "my_reward" not in sys.modules


def test_a_class_that_a_plugin_lacks_gets_the_nearest_or_all_of_its_classes(tmp_path, monkeypatch):
    (tmp_path / "two_scorers.py").write_text("from io import BytesIO\nclass Bright: ...\nclass Dark: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "Did you mean 'Bright'?" in str(refused("two_scorers.Brigt", ("two_scorers",)))
    assert str(refused("two_scorers.Zebra", ("two_scorers",))).endswith("has no 'Zebra'. It has: Bright, Dark")


def test_a_class_that_is_not_there_gets_the_nearest_name():
    error = refused("unirl.sde.kernels.FlowSDEStrategie")
    assert error.code == 2003
    assert "Did you mean 'FlowSDEStrategy'?" in str(error)
    assert "Did you mean 'kernels'?" in str(refused("unirl.sde.kernel.FlowSDEStrategy"))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy_pack").mkdir()
    (tmp_path / "needy_pack" / "__init__.py").write_text("import library_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match="library_that_is_not_there"):
        find_target("needy_pack.Thing", "reward", ("needy_pack",))
    way_out = "cannot import 'absent_pack'. Run from its folder, set PYTHONPATH, or install it"
    with pytest.raises(DependencyError, match=way_out):
        find_target("absent_pack.Thing", "reward", ("absent_pack",))

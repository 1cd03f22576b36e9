"""The examples of docs/extending.md work: the test writes them to files, checks them and runs them."""

import re

import pytest

from tests.processes import run_python
from tests.source_tree import ROOT
from unirl.rollout.engine.base import DedicatedEngine

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    """The code block with this number among those of a language on the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the package and the recipe of the page."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in {
        "leash/__init__.py": "",
        "leash/losses.py": block("python", 0),
        "check.py": block("python", 1),
        "leash/kernels.py": block("python", 2),
        "check_kernel.py": block("python", 3),
        "leash/rewards.py": block("python", 4),
        "check_reward.py": block("python", 5),
        "mine.yaml": block("yaml", 0),
        "prompts.txt": "a red circle\n" * 8,
        "examples/diffusion/sd3_leash.yaml": block("yaml", 1),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(project, *words: str, status: int = 0) -> str:
    result, output = run_python(words, project)
    assert result == status, output
    return output


@pytest.mark.parametrize("script", ["check.py", "check_kernel.py", "check_reward.py"])
def test_the_examples_pass_their_public_checks(project, script: str) -> None:
    run(project, script)


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("weighted_sum(losses, weights)", "weighted_sum(losses, weights) / len(losses)", "must be a SUM over rows"),
        ("train/policy_loss", "train/leash", "metrics must be in the table docs/metrics.md, or be named custom/"),
    ],
)
def test_the_check_refuses_a_loss_that_a_run_would_refuse(project, right: str, wrong: str, why: str) -> None:
    source = project / "leash" / "losses.py"
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    try:
        assert why in run(project, "check.py", status=1)
    finally:
        source.write_text(text)


def test_the_recipe_of_the_users_own_on_the_page_is_valid(project) -> None:
    command = block("bash", 0).splitlines()[0].split()[1:]
    assert "mine: valid" in run(project, "-m", "unirl.cli", *command, "scale=toy")


def test_the_recipe_of_the_page_trains(project) -> None:
    command = block("bash", 1).splitlines()[1].split()[1:]
    run(project, *command, f"run.dir={project / 'run'}", "evaluation.eval_steps=0", "tracking.sample_steps=0")
    assert len((project / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_recipe_may_name_the_kernel_and_the_reward_of_the_page(project) -> None:
    targets = re.findall(r"(\w+): \{(\w+): (\{_target_: leash\.[\w.]+\})\}", PAGE)
    assert [(block, key) for block, key, _ in targets] == [("sampling", "kernel"), ("reward", "backend")]
    keys = [f"{block}.{key}={target}" for block, key, target in targets]
    run(project, "-m", "unirl.cli", "check", "diffusion/sd3_leash", "plugins=[leash]", *keys)


def test_a_wrong_key_gives_the_message_of_the_page(project) -> None:
    output = run(
        project, "-m", "unirl.cli", "check", "diffusion/sd3_leash", "plugins=[leash]", "algorithm.widht=1", status=2
    )
    assert block("text").strip() in output


def test_every_import_of_the_page_works() -> None:
    imports = re.findall(r"^(from unirl\.\S+ import .+)$", PAGE, re.MULTILINE)
    assert len(imports) >= 20
    for line in imports:
        exec(line, {})


def test_the_page_lists_every_abstract_method_of_an_engine() -> None:
    rows = re.findall(r"^\| `(\w+)\([\w, ]*\)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(DedicatedEngine.__abstractmethods__)


def test_every_file_that_the_page_names_exists() -> None:
    paths = re.findall(r"`((?:unirl|tests|examples)/[^`]*)`", PAGE)
    missing = [path for path in paths if not (ROOT / path).exists() and "sd3_leash" not in path]
    assert paths and missing == []

"""docs/extending.md does what it says: its files are written out of the page, checked and run."""

import os
import re
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    """The page's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the page's package and recipe."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in {
        "leash/__init__.py": "",
        "leash/losses.py": block("python", 0),
        "check.py": block("python", 1),
        "examples/diffusion/sd3_leash.yaml": block("yaml"),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(project, *words: str, status: int = 0) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_algorithm_passes_the_public_check(project) -> None:
    run(project, "check.py")


def test_the_check_of_the_page_finds_a_mean_where_a_sum_belongs(project) -> None:
    source = project / "leash" / "losses.py"
    text = source.read_text()
    source.write_text(text.replace("weighted_sum(losses, weights)", "weighted_sum(losses, weights) / len(losses)"))
    try:
        assert "must be a SUM over rows" in run(project, "check.py", status=1)
    finally:
        source.write_text(text)


def test_the_recipe_trains(project) -> None:
    command = block("bash").splitlines()[1].split()[1:]
    run(project, *command, f"run.dir={project / 'run'}", "evaluation.eval_steps=0", "tracking.sample_steps=0")
    assert len((project / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_wrong_key_is_answered_as_the_page_shows(project) -> None:
    said = run(project, "-m", "unirl.cli", "check", "diffusion/sd3_leash", "algorithm.widht=1", status=2)
    assert block("text").strip() in said


def test_every_name_that_the_page_imports_is_there() -> None:
    imports = re.findall(r"^(from unirl\.\S+ import .+)$", PAGE, re.MULTILINE)
    assert len(imports) >= 20
    for line in imports:
        exec(line, {})


def test_every_file_that_the_page_names_is_there() -> None:
    paths = re.findall(r"`((?:unirl|tests|examples)/[^`]*)`", PAGE)
    missing = [path for path in paths if not (ROOT / path).exists() and "sd3_leash" not in path]
    assert paths and missing == []

"""What the README and the pages for new users say is true: their snippets run, and the places that they name exist."""

import json
import re
import shlex
import shutil

import pytest
from PIL import Image

from scripts import first_gpu_page as gpu_page
from tests.processes import run_python
from tests.source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ("num_rollouts=1", "evaluation.eval_steps=0", "tracking.sample_steps=0", "save_interval=0", "batch_size=2")
SMALL += ("stack.micro_batch_size=32", "sampling.samples_per_prompt=4", "sampling.num_inference_steps=4")


def section(title: str) -> str:
    """The part of the README below a heading."""
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def block(title: str, language: str) -> str:
    """The first code block of a language below a heading."""
    found = re.search(rf"```{language}\n(.*?)```", section(title), re.DOTALL)
    assert found is not None, f"README, {title!r}: there is no block of {language}"
    return found[1]


def commands(title: str) -> list[list[str]]:
    """The lines of the first shell block below a heading, each as words without its comment."""
    return [shlex.split(line, comments=True) for line in block(title, "bash").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the README tells a user to write."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_reward.py").write_text(block("Your own reward", "python"))
    (folder / "mine.jsonl").write_text(block("Your own data", "json"))
    (folder / "my_loss.py").write_text(block("Your own loss and recipe", "python"))
    (folder / "mine.yaml").write_text(block("Your own loss and recipe", "yaml"))
    shutil.copytree(ROOT / "unirl" / "models" / "sd3" / "quickstart", folder / "my-model")
    return folder


@pytest.mark.parametrize("title", ["Your own reward", "Your own data", "Your own model", "Your own loss and recipe"])
def test_the_commands_of_the_readme_run(folder, title: str) -> None:
    check, train = [words[1:] for words in commands(title) if words[0] == "unirl"]
    status, output = run_python(["-m", "unirl.cli", *check], folder)
    assert status == 0, output
    run = folder / f"run {title}"
    status, output = run_python(["-m", "unirl.cli", *train, *SMALL, f"run.dir={run}"], folder)
    assert status == 0, output
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    if title == "Your own reward":
        assert "reward/darkness_mean" in json.loads((run / "metrics.jsonl").read_text())
    if title == "Your own loss and recipe":
        assert "custom/log_ratio" in json.loads((run / "metrics.jsonl").read_text())


def test_the_lines_of_the_first_gpu_run_work_in_their_order(tmp_path) -> None:
    """In a fresh checkout. Instead of the training that needs a GPU, its recipe and settings are checked."""
    for name in ("datasets", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {"HF_HUB_OFFLINE": "1"}
    answers = {}
    for number, (program, *words) in enumerate(commands("First GPU run")):
        if program == "export":
            environ |= dict([words[0].split("=", 1)])
            continue
        assert program == "unirl"
        words = ["check", *words[1:]] if "run.name=first" in words else words
        status, output = run_python(["-m", "unirl.cli", *words], tmp_path, environ)
        answers[number, words[0]] = status
        assert "error[" not in output, output
    assert [word for _, word in answers] == ["train", "doctor", "fit", "check"]
    assert [status for (_, word), status in answers.items() if word != "doctor"] == [0, 0, 0]
    assert answers[3, "doctor"] in (0, 3)


def test_plain_diffusers_loads_the_adapter_of_the_quick_start(tmp_path) -> None:
    folder = ROOT / "unirl" / "models" / "sd3" / "quickstart"
    code = (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    train = ["train", "diffusion/quickstart", *SMALL, "run.dir=run"]
    for command in (train, ["export", "run", "--format", "diffusers-lora", "--format", "full"]):
        status, output = run_python(["-m", "unirl.cli", *command], tmp_path)
        assert status == 0, output
    code = code.replace("unirl/models/sd3/quickstart", str(folder))
    code = code.replace("runs/unirl/first/export/checkpoint-000044", "run/export/checkpoint-000001")
    (tmp_path / "plain.py").write_text(code)
    status, output = run_python(["plain.py"], tmp_path)
    assert status == 0, output
    with Image.open(tmp_path / "circle.png") as image:
        assert image.size == (24, 24)
    full = tmp_path / "run" / "export" / "checkpoint-000001" / "full"
    (full / "use.py").write_text((full / "README.md").read_text().split("```python\n")[1].split("```")[0])
    status, output = run_python(["use.py"], full)
    assert status == 0, output


def test_the_readme_is_in_the_order_of_a_new_user() -> None:
    titles = re.findall(r"^## (.+)$", README, re.MULTILINE)
    first = ["Two commands", "What you just saw", "First GPU run"]
    own = ["Your own reward", "Your own data", "Your own model", "Your own loss and recipe"]
    assert titles[:7] == [*first, *own]
    assert titles.index("Status") < titles.index("What runs")
    assert README.index("quickstart.png") < README.index("## What you just saw")


def test_the_metrics_to_watch_exist() -> None:
    table = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([a-z]+/[\w]+)` \(", section("What you just saw"), re.MULTILINE)
    assert len(names) == 6
    assert [name for name in names if f"| `{name}` |" not in table] == []


def test_the_places_of_the_glossary_exist() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()[6:]
    words = [row.split("|")[1].strip() for row in rows]
    assert words == sorted(words, key=str.lower) and len(words) >= 40
    for row in rows:
        path, *name = re.findall(r"`([^`]+)`", row.split("|")[3])
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(class |def )?{name[0]}\b", source, re.MULTILINE), row


def test_the_page_of_the_first_gpu_run_has_the_stored_figures() -> None:
    result = json.loads(gpu_page.RESULT.read_text())
    assert gpu_page.PAGE.read_text(encoding="utf-8") == gpu_page.page(result), "run scripts/first_gpu_page.py --render"


@pytest.mark.slow  # counts a published network
@pytest.mark.parametrize("device", ["4090", "h200"])
def test_the_stored_figures_are_what_fit_finds(device: str) -> None:
    stored = json.loads(gpu_page.RESULT.read_text())["sd3"][device]
    assert stored == gpu_page.counted("sd3", device), "run scripts/first_gpu_page.py sd3"

"""Mistakes in a user's own class are answered as such: the class, the line, the contract, and never error 1001."""

import os
import re
import subprocess
import sys

import pytest

from tests.processes import run_python
from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.failures import failure_of
from unirl.config.targets import find_target

SCORER = """\
import sys

import torch
from unirl.reward.base import RewardScorer, single
from unirl.types.reward import RewardResponse

class Mine(RewardScorer):
    reads = ("images",)

{body}
"""
SOUND = "    def score(self, request):\n        return single('mine', request.images.mean(dim=(1, 2, 3)))"
SCORES = "    def score(self, request):\n        "


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the module `scoring` of a package in the current folder, which is not on Python's path."""
    name = f"pack_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(text: str) -> str:
        (tmp_path / name / "scoring.py").write_text(text)
        return name

    yield write
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def lint(name: str) -> list[str]:
    return ["reward", "lint", "-r", f"{name}.scoring.Mine", "--plugins", name]


def test_a_plugin_is_found_in_the_current_folder(package, capsys):
    assert main(lint(package(SCORER.format(body=SOUND)))) == 0
    assert "not constant" in capsys.readouterr().out


def test_the_current_folder_hides_no_installed_package(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    script = "import sys; sys.path.remove(''); from unirl.cli.main import main; sys.exit(main(['reward', 'ls']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    status = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert status.returncode == 0, status.stderr


def test_a_package_that_python_cannot_import_is_named_with_the_ways_out(capsys):
    assert main(["reward", "lint", "-r", "leash.rewards.Leash", "--plugins", "leash"]) == 3
    shown = capsys.readouterr().err
    assert "Python cannot import 'leash'. Run from its folder, set PYTHONPATH, or install it" in shown


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("class Mine(:\n    pass\n", 2, r"scoring\.py:1: SyntaxError"),
        ("def f():\n    return {}['x']\n\nf()\n", 2, r"scoring\.py:2: KeyError: 'x'"),
        ("import sys\nsys.exit(3)\n", 2, r"scoring\.py:2: SystemExit: 3"),
        (SCORER.format(body="    pass"), 2, r"has no score"),
        (SCORER.format(body="    def __init__(self):\n        {}['x']\n" + SOUND), 2, r"scoring\.py:11: KeyError"),
        (
            SCORER.format(body="    def __init__(self):\n        sys.exit(3)\n" + SOUND),
            2,
            r"scoring\.py:11: SystemExit",
        ),
        (SCORER.format(body="    def __init__(self, *things): ...\n" + SOUND), 2, r"takes \*things"),
        (SCORER.format(body=SCORES + "return None"), 6, r"returned NoneType, not a RewardResponse"),
        (SCORER.format(body=SCORES + "return [0.5]"), 6, r"returned list, not a RewardResponse"),
        (SCORER.format(body=SCORES + "return RewardResponse(total=[1.0], components={})"), 6, r"'total' as list"),
        (SCORER.format(body=SCORES + "return single('my score', torch.ones(len(request)))"), 6, r"named 'my score'"),
        (SCORER.format(body=SCORES + "return 1 / 0"), 6, r"scoring\.py:11: ZeroDivisionError"),
        (SCORER.format(body=SCORES + "sys.exit(3)"), 6, r"scoring\.py:11: SystemExit: 3"),
        (SCORER.format(body="    def score(self): ..."), 6, r"scoring\.py:7: TypeError"),
    ],
)
def test_a_mistake_in_a_class_of_the_user_names_it(package, capsys, tmp_path, text, status, said):
    name = package(text)
    assert main(lint(name)) == status
    shown = capsys.readouterr().err
    assert re.search(said, shown), shown
    assert f"{name}.scoring" in shown
    assert "1001" not in shown and "Traceback" not in shown
    assert len(shown.rstrip().splitlines()) <= 6
    assert [path.name for path in tmp_path.iterdir()] == [name]


LOSS = """\
from dataclasses import dataclass

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.denoising import DenoisingLoss

{decorator}
class Mine({base}):
{body}
"""
DECORATED = "@dataclass(frozen=True, kw_only=True)"
FIELD = "    width: float = 1e-3\n"
OLD = "    def old_quantities(self): return ('logp',)\n"
EQUATION = "    def policy_loss(self, new, rows, part, advantages, now): ...\n"
WHOLE = FIELD + OLD + EQUATION
WRITE = r"Write @dataclass\(frozen=True, kw_only=True\) above the class"


@pytest.mark.parametrize(
    ("decorator", "base", "body", "said"),
    [
        (DECORATED, "DenoisingLoss", FIELD + EQUATION, r"scoring\.py:6: it has no old_quantities .*Write it as "),
        (DECORATED, "DenoisingLoss", EQUATION + OLD.replace("tities", "tites"), r"It has old_quantites: rename it"),
        (DECORATED, "DenoisingLoss", OLD, r"it has no policy_loss (?s:.*)Contract of DenoisingLoss\.policy_loss: "),
        (DECORATED, "StageAlgorithm", "    pass", r"it has no loss, measure, parts (?s:.*)StageAlgorithm\.parts:"),
        ("", "DenoisingLoss", WHOLE, rf"scoring\.py:7: its base .* so width would be no key\. {WRITE}"),
        (DECORATED.replace(", kw_only=True", ""), "DenoisingLoss", WHOLE, rf"width would be .*{WRITE}"),
        ("", "DenoisingLoss", "    def __init__(self): ...\n" + OLD + EQUATION, r"it has an __init__"),
        ("@dataclass", "DenoisingLoss", WHOLE, r"scoring\.py:6: TypeError: cannot inherit non-frozen"),
        (DECORATED, "DenoisingLoss", WHOLE.replace(": float", ""), r"no key\. Write width: float = 0\.001"),
    ],
)  # fmt: skip
def test_a_loss_of_the_user_that_cannot_be_built_is_refused_by_check(
    package, capsys, tmp_path, decorator, base, body, said
):
    name = package(LOSS.format(decorator=decorator, base=base, body=body))
    loss = [f"plugins=[{name}]", f"algorithm._target_={name}.scoring.Mine", "algorithm.width=2e-3"]
    assert main(["check", "diffusion/quickstart", *loss]) == 2
    shown = capsys.readouterr().err
    assert re.search(said, shown), shown
    assert f"{name}.scoring" in shown and "sampling.width" not in shown
    assert len(shown.rstrip().splitlines()) <= 6
    assert [path.name for path in tmp_path.iterdir()] == [name]


CONSTRUCTOR = "    def __init__(self, {}): ...\n"
READS = 'reads = ("images",)'


@pytest.mark.parametrize("reads", ['reads = ("image",)', "", 'reads = "images"'])
@pytest.mark.parametrize("weighted", [False, True])
def test_wrong_columns_are_refused_before_anything_loads(package, capsys, reads, weighted):
    name = package(SCORER.replace(READS, reads).format(body=SOUND))
    scorer = f"{{_target_: {name}.scoring.Mine}}"
    block = f"{{_target_: unirl.reward.combine.WeightedRewards, scorers: {{a: {scorer}}}, weights: {{a: 1}}}}"
    reward = f"reward.backend={block if weighted else scorer}"
    assert main(["check", "diffusion/quickstart", f"plugins=[{name}]", reward]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"scoring\.py:7.*Write a tuple of columns, such as reads = \(\"images\", ", shown), shown


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CONSTRUCTOR.format("power") + SOUND, r"takes power by position.* Write def __init__\(self, \*, power\)"),
        (CONSTRUCTOR.format("*, power") + SOUND, r"required and not set\. Write reward.backend.power=\.\.\.\n"),
        ("    pass", r"scoring\.py:7: it has no score .*\n  Contract of RewardScorer\.score: "),
        (SOUND.replace("score(", "scores("), r"it has no score .* It has scores: rename it"),
    ],
)
def test_a_scorer_of_the_user_that_cannot_be_built_is_refused(package, capsys, body, said):
    name = package(SCORER.format(body=body))
    own = [f"plugins=[{name}]", f"reward.backend._target_={name}.scoring.Mine"]
    assert main(["check", "diffusion/quickstart", *own]) == 2
    shown = capsys.readouterr().err
    assert re.search(said, shown), shown


def test_a_class_without_the_base_of_scorers_is_told_the_base(package, capsys):
    name = package("class Mine:\n    reads = ('images',)\n")
    assert main(lint(name)) == 2
    assert "has no base RewardScorer. Derive the class from unirl.reward.base.RewardScorer" in capsys.readouterr().err


PICKY = """
    def check_prompt(self, prompt, metadata):
        if "cat" not in prompt:
            from unirl.config.errors import RewardError
            raise RewardError(f"there is no cat in {prompt!r}")
"""


def test_the_prompts_of_a_file_are_checked_by_a_scorer_of_the_user(package, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    name = package(SCORER.format(body=SOUND + PICKY))
    words = ["data", "check", "prompts.txt", "--reward", f"{name}.scoring.Mine"]
    assert main([*words, "--plugins", name]) == 4
    assert "prompts.txt:2: reward 'Mine' cannot score this prompt: there is no cat" in capsys.readouterr().err
    assert main(words) == 2
    assert f"allow it: plugins=[{name}]" in capsys.readouterr().err


def test_a_message_shows_the_failing_lines_and_the_contract(package, capsys):
    body = SCORES + "return self.share(request)\n\n    def share(self, request):\n        return 1 / 0"
    assert main(lint(package(SCORER.format(body=body)))) == 6
    shown = capsys.readouterr().err
    assert "in score: return self.share(request)" in shown
    assert "in share: return 1 / 0" in shown
    assert "Contract of RewardScorer:" in shown


def test_an_attribute_that_a_class_of_the_user_lacks_is_its_own_mistake(package, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = package("class Mine:\n    def take(self, rows): ...\n")
    mine = find_target(f"{name}.scoring.Mine", "algorithm", (name,))
    with pytest.raises(AttributeError) as caught:
        mine().needs  # noqa: B018
    failure = failure_of(caught.value)
    assert failure.status == 2
    assert re.search(r"your class \S+Mine, \S+scoring.py:1: AttributeError: .* no attribute 'needs'", failure.message)


def test_a_crash_in_native_code_names_the_line_that_called_it(package, tmp_path):
    name = package(SCORER.format(body=SCORES + "import ctypes\n        ctypes.string_at(0)"))
    status, output = run_python(["-m", "unirl.cli", *lint(name)], tmp_path)
    assert status < 0
    assert re.search(r'scoring\.py", line 12 in score', output)

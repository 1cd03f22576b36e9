"""The commit-msg hook accepts good messages, and names every rule that a bad one breaks."""

import pytest

from scripts.check_commit_message import main, problems

BODY = "\n\nThe former name had two meanings. Checked: tests/sde.\n"


@pytest.mark.parametrize(
    "message",
    [
        "sde: make kernels return a Gaussian" + BODY,
        "data, trainer: call rows that are not trained padding" + BODY,
        "models: move the loaders to loading/\n",
        "sde: make kernels return a Gaussian" + BODY + "# Please enter the commit message for your changes.\n",
        "Merge branch 'tracking'\n",
        'Revert "sde: make kernels return a Gaussian"\n\nThis reverts commit 46258f8.\n',
    ],
)
def test_good_messages_pass(message):
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("Make kernels return a Gaussian" + BODY, "must read `area: what the commit does`"),
        ("sde: make kernels return a Gaussian." + BODY, "without a full stop"),
        ("sde: " + "x" * 80 + BODY, "85 characters"),
        ("sde: make kernels return a Gaussian\nThe former name had two meanings.\n", "second line must be empty"),
        ("sde: make kernels return a Gaussian\n", "body is missing"),
        ("sde: make kernels return a Gaussian\n\n# Please enter the commit message\n", "body is missing"),
    ],
)
def test_a_broken_rule_is_named(message, rule):
    (problem,) = problems(message)
    assert rule in problem


def test_the_hook_fails_on_a_bad_message_and_prints_why(tmp_path, monkeypatch, capsys):
    path = tmp_path / "COMMIT_EDITMSG"
    for message, status in (("sde: make kernels return a Gaussian" + BODY, 0), ("kernels", 1)):
        path.write_text(message)
        monkeypatch.setattr("sys.argv", ["check_commit_message.py", str(path)])
        assert main() == status
    assert "commit message: the body is missing" in capsys.readouterr().err

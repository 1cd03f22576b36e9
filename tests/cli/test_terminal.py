"""No text of others acts on the terminal on which a command prints it."""

from __future__ import annotations

import pytest

from unirl.cli.main import main
from unirl.tracking.streams import inert

ATTACKS = {
    "escape": "\x1b]0;owned\x07",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d0;owned\x9c",
    "bidi override": "\u202egnp.exe",
    "bidi isolate": "\u2066x\u2069",
    "zero width": "a\u200bb",
    "backspace": "abc\x08\x08",
    "carriage return": "good\rbad",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_control_and_direction_characters_are_spelled_out(text):
    shown = inert(text)
    assert shown.isprintable() and "<U+" in shown


def test_ordinary_text_of_any_script_stays_as_it_is():
    text = "a red circle\n\trouge \u00e9\u00e8 \u7ea2\u8272\u3000\u0627\u062d\u0645\u0631 \u00a0!"
    assert inert(text) == text


@pytest.mark.parametrize("text", ["\x9b2J", "\u202egnp.exe"], ids=["C1", "bidi"])
def test_commands_print_prompts_recipes_and_errors_without_them(text, tmp_path, capsys):
    (tmp_path / "p.txt").write_text(f"a red circle {text}\n", encoding="utf-8")
    assert main(["data", "preview", str(tmp_path / "p.txt")]) == 0
    assert main(["config", "show", "diffusion/quickstart", "run.name", f"run.name='{text}'"]) == 0
    assert main(["train", f"no_such_{text}"]) == 2
    shown = capsys.readouterr()
    assert not any(c in shown.out + shown.err for c in text if not c.isprintable())
    assert "<U+" in shown.out and "<U+" in shown.err

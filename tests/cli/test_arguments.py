"""How the words of a command line become options and recipe settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.cli.arguments import Parser, parse_recipe, recipe_parser, split_settings
from unirl.config.errors import UsageError

OPTIONS = {"--cfg": True, "--resolve": False}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["a.b=1"], ["a.b=1"]),
        (["--a.b", "1"], ["a.b=1"]),
        (["--a.b=1"], ["a.b=1"]),
        (["--batch-size", "4"], ["batch_size=4"]),
        (["+a.b=1"], ["+a.b=1"]),
        (["++a.b=1"], ["++a.b=1"]),
        (["~a.b"], ["~a.b"]),
        (["a.list=[1,2]"], ["a.list=[1,2]"]),
        (["a.text=x=y"], ["a.text=x=y"]),
        (["--a.b", "-1"], ["a.b=-1"]),
        (["--resume", "auto"], ["resume=auto"]),
        (["--name", "first", "--out=/tmp/x"], ["run.name=first", "run.dir=/tmp/x"]),
        (["--max-steps", "3", "--seed", "1"], ["num_rollouts=3", "sampling.seed=1"]),
    ],
)
def test_every_spelling_becomes_one_setting(words, settings):
    assert split_settings(words, OPTIONS) == ([], settings)


def test_options_of_the_command_are_not_settings():
    own, settings = split_settings(["R", "--cfg", "job", "x=1", "--resolve", "--cfg=job"], OPTIONS)
    assert own == ["R", "--cfg", "job", "--resolve", "--cfg=job"]
    assert settings == ["x=1"]


def test_an_option_at_the_end_says_that_it_needs_a_value():
    with pytest.raises(UsageError, match=r"--a\.b needs a value"):
        split_settings(["--a.b"], OPTIONS)


keys = st.from_regex(r"[a-z_]{1,6}(\.[a-z_]{1,6}){0,3}", fullmatch=True)
values = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(keys, values), max_size=5))
def test_the_three_spellings_mean_the_same(pairs):
    plain = [f"{key}={value}" for key, value in pairs]
    apart = [word for key, value in pairs for word in (f"--{key}", value)]
    joined = [f"--{key}={value}" for key, value in pairs]
    expected = [f"{key}={value}" for key, value in pairs]
    taken = {"--resume", "--name", "--project", "--out", "--seed"}
    if not taken & {f"--{key}" for key, _ in pairs}:
        assert split_settings(plain, {})[1] == expected
        assert split_settings(apart, {})[1] == expected
        assert split_settings(joined, {})[1] == expected


def parser() -> Parser:
    return recipe_parser("train", "Train.", ["unirl train R"])


@pytest.mark.parametrize("words", [["R", "a=1"], ["a=1", "R"], ["--config-name=R", "a=1"], ["-cn", "R", "a=1"]])
def test_the_recipe_is_found_wherever_it_stands(words):
    arguments = parse_recipe(parser(), words)
    assert (arguments.recipe, arguments.overrides) == ("R", ("a=1",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a recipe"),
        (["R", "--config-name=Q"], "two recipes are named, 'R' and 'Q'"),
        (
            ["R", "num_rollouts"],
            r"unknown argument 'num_rollouts'\. A setting is num_rollouts=VALUE\. See unirl train -h",
        ),
        (["R", "-x"], "unknown argument '-x'"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        parse_recipe(parser(), words)


def test_a_misspelt_option_gets_the_nearest_one():
    plain = Parser("env", "Report.", [])
    plain.option("--json", action="store_true")
    with pytest.raises(UsageError, match="Did you mean '--json'"):
        plain.parse(["--jsno"])


def test_help_shows_the_examples_first(capsys):
    with pytest.raises(SystemExit) as left:
        parser().parse(["-h"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert shown.startswith("examples:\n  unirl train R\n")
    assert "a.b=1" in shown

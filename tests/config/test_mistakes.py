"""Mistakes of people: always one short error that says what to do, never a traceback, and the right word suggested."""

import random
import string
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering_recipes import COVERED
from unirl.config.build import schemas_of
from unirl.config.compose import compose
from unirl.config.errors import ConfigError, UniRLError, did_you_mean, nearest, report
from unirl.config.load import check, load
from unirl.config.merge import ConfigLayer, fold, leaves, put
from unirl.config.overrides import command_line_layer
from unirl.plan.preflight import preflight

RECIPE = "diffusion/sd3_trainside"
CHECKED = load(RECIPE)
KEYS = [path for path, _ in leaves(CHECKED.resolved()) if not path.endswith("_target_")]


def answer(*overrides, recipe=RECIPE):
    """What the user reads."""
    with pytest.raises(UniRLError) as caught:
        preflight(load(recipe, overrides))
    return report(caught.value)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("backend.optimizer_cfg.learning_rat=1", "error[2003]: unknown key 'backend.optimizer_cfg.learning_rat'"),
        ("backend.optimizer_cfg.learning_rat=1", "Did you mean 'backend.optimizer_cfg.learning_rate'?"),
        ("+backend.optimizer_cfg.learning_rat=1", "Did you mean 'backend.optimizer_cfg.learning_rate'?"),
        ("++backend.optimizer_cfg.learning_rat=1", "Did you mean 'backend.optimizer_cfg.learning_rate'?"),
        ("bundle=sd3", "error[2005]: bundle=sd3 would replace the block 'bundle'"),
        ("bundle=sd3", "bundle.path=sd3"),
        ("reward=jpeg_compressibility", "`unirl reward ls NAME` prints it"),
        ("reward.backend=jpeg_compressibility", "`unirl reward ls NAME` prints it"),
        ("rollout=servr", "Did you mean 'server'? rollout=openai|replica|server|"),
        ("algorithm=grpo", "=...), or replace the block: algorithm='{_target_: package.Class}'"),
        (
            "backend.optimizer_cfg.learning_rate=abc",
            "error[2004]: backend.optimizer_cfg.learning_rate must be a number",
        ),
        ("backend.optimizer_cfg.learning_rate='1e-4'", "Write it without quotes"),
        ("height=256", "Did you mean 'sampling.height'?"),
        ("num_updates_per_batch=4", "Did you mean 'stack.num_updates_per_batch'?"),
        ("prompts_per_rollout=8", "Write batch_size=<prompts per step>"),
        ("layout=colocate", "Write placement"),
        ("train_fraction=0.5", "Write placement"),
        ("sampling.eta=0.3", "sampling.kernel.eta"),
        ("stak.micro_batch_size=2", "Did you mean 'stack'?"),
        ("algorithm.clip_range=2", "algorithm.clip_range must lie in (0, 1), got 2.0"),
        ("algorithm.old_logp_source=reply", "Did you mean 'replay'?"),
        ("runtime=locale", "Did you mean 'local'?"),
        ("run.eval_data_path=a.txt", "Write evaluation.data_path=<file>"),
    ],
)
def test_what_hydra_would_take_or_answer_badly_is_answered_well(typed, says):
    assert says in answer(typed)


def test_a_missing_recipe_is_answered_with_names():
    assert "error[2001]" in answer(recipe="diffusion/confg")
    assert "Nearest:" in answer(recipe="diffusion/confg")


def test_the_place_of_a_mistake_is_said(tmp_path):
    text = CHECKED.file.path.read_text().replace("learning_rate: 3e-4", "learning_rat: 3e-4")
    (tmp_path / "mine.yaml").write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "learning_rat:" in row)
    assert f"(mine.yaml:{line})" in answer(recipe=str(tmp_path / "mine.yaml"))
    assert "(command line: sampling.heigth=1)" in answer("sampling.heigth=1")


def typos(word, rng):
    """A word with one letter left out, doubled, exchanged for another, or two neighbours swapped."""
    at = rng.randrange(len(word))
    other = rng.choice(string.ascii_lowercase)
    swapped = word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
    return {word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + other + word[at + 1 :], swapped}


def test_one_wrong_letter_gets_the_right_key_in_95_of_100_cases():
    rng = random.Random(0)
    schemas = schemas_of(CHECKED.composed.resolved())
    asked = right = 0
    for schema in schemas.values():
        for key in schema.keys:
            for typo in typos(key, rng) - set(schema.keys):
                asked += 1
                right += did_you_mean(typo, schema.keys) == f" Did you mean '{key}'?"
    assert asked > 200
    assert right / asked >= 0.95


def test_a_word_unlike_every_key_gets_no_suggestion():
    assert did_you_mean("zzzz", ["height", "width"]) == ""
    assert nearest("widht", ["height", "width", "seed"], 1) == ["width"]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["-1", "0", "1e400", "${a}", "${oc.env:HOME}", "[1", "{", "os.system", "unirl.sde.kernels", "~", "'"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=4), below, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KEYS), VALUES, st.sampled_from(["", "+", "++"]))
def test_no_value_of_any_key_ends_in_anything_but_success_or_a_short_error(key, value, prefix):
    text = f"{prefix}{key}={value}" if not isinstance(value, float) else f"{key}={value!r}"
    try:
        preflight(load(RECIPE, [text]))
    except UniRLError as error:
        assert error.exit_status in (2, 4)
        assert len(report(error)) < 1500


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20))
def test_no_text_on_the_command_line_ends_in_anything_but_success_or_a_short_error(text):
    try:
        load(RECIPE, [text])
    except UniRLError as error:
        assert error.exit_status == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([path for path, _ in leaves(CHECKED.resolved())]), VALUES)
def test_no_yaml_value_ends_in_anything_but_success_or_a_short_error(key, value):
    """As above, for data that YAML can hold and the command line cannot."""
    tree = {}
    put(tree, key, value)
    layered = replace(CHECKED.composed, layers=(*CHECKED.composed.layers, ConfigLayer("recipe", tree)))
    try:
        check(layered)
    except UniRLError as error:
        assert error.exit_status in (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COVERED)
def test_a_recipe_survives_its_own_keys_being_taken_away(recipe):
    """As `~key` on the command line does it; each file is read once."""
    composed = compose(recipe)
    below = composed.layers[:-1]
    for key in composed.tree:
        try:
            check(replace(composed, layers=(*below, command_line_layer([f"~{key}"], fold(below)))))
        except ConfigError as error:
            assert key in str(error)

"""The signature is the schema: keys, types, ranges, defaults and wiring all come from constructors."""

import dataclasses
import math
import pickle
from typing import Annotated

import pytest
import yaml
from msgspec import Meta

from tests.config import stand_ins
from tests.config.stand_ins import Inner, Nested, Outer, Range, Square, Worker
from unirl.config.build import build, check_node
from unirl.config.errors import ConfigError, GeometryError, InvalidValueError, PluginError
from unirl.config.key_docs import docs_of, list_keys
from unirl.config.schema import schema_of
from unirl.config.values import spell

PLUGINS = ("tests",)
HERE = "tests.config.stand_ins"


def checked(tree, expected=Outer):
    return check_node(tree, expected, "top", PLUGINS)


def refused(tree, expected=Outer):
    with pytest.raises(ConfigError) as caught:
        checked(tree, expected)
    return caught.value


def test_a_checked_node_builds_what_the_constructor_would_make():
    tree = {
        "size": 3,
        "ratio": 1,
        "name": "x",
        "steps": [1, 2],
        "pair": [3, 4],
        "table": {"a": 1},
        "inner": {"count": 7},
        "shape": {"_target_": f"{HERE}.Square", "side": 2},
        "shapes": [{"_target_": f"{HERE}.Square"}],
    }
    expected = Outer(
        size=3,
        ratio=1.0,
        name="x",
        steps=(1, 2),
        pair=(3, 4.0),
        table={"a": 1.0},
        inner=Inner(count=7),
        shape=Square(side=2.0),
        shapes=[Square()],
    )
    assert build(checked(tree)) == expected
    assert type(build(checked(tree)).ratio) is float


def test_resolved_holds_every_key_and_checks_to_the_same_object():
    node = checked({"size": 2, "shape": {"_target_": f"{HERE}.Square"}})
    data = yaml.safe_load(yaml.safe_dump(node.resolved()))
    assert set(data) == {field.name for field in dataclasses.fields(Outer)}
    assert data["inner"] == {"count": 3, "mode": "fast"}
    assert build(checked(data)) == build(node)
    assert checked(data).resolved() == node.resolved()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("size", "3", 2004),
        ("size", 3.0, 2004),
        ("size", True, 2004),
        ("size", None, 2004),
        ("size", {"a": 1}, 2004),
        ("ratio", "abc", 2004),
        ("ratio", math.nan, 2004),
        ("ratio", False, 2004),
        ("name", 3, 2004),
        ("flag", 1, 2004),
        ("flag", "true", 2004),
        ("steps", 3, 2004),
        ("steps", "12", 2004),
        ("steps", [1, "2"], 2004),
        ("pair", [1], 2004),
        ("pair", [1, 2, 3], 2004),
        ("table", [1], 2004),
        ("table", {"a": "b"}, 2004),
        ("inner", 3, 2005),
        ("inner", None, 2005),
        ("inner", {"count": 0}, 2004),
        ("inner", {"mode": "fats"}, 2004),
        ("inner", {"coutn": 2}, 2003),
        ("inner", {"_target_": f"{HERE}.Square"}, 2004),
        ("shape", {"side": 2}, 2003),
        ("shape", "Square", 2005),
        ("shape", {"_target_": f"{HERE}.Blob"}, 2004),
        ("shape", {"_target_": f"{HERE}.Square", "side": -1}, 2004),
        ("shapes", [{"_target_": f"{HERE}.Blob"}], 2004),
        ("anything", {"_target_": f"{HERE}.Square"}, 2003),
        ("anything", [{"deep": {"_target_": "os.system"}}], 2003),
        ("_partial_", True, 2003),
        ("_recursive_", False, 2003),
        ("_args_", [1], 2003),
        ("_convert_", "all", 2003),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_path(key, value, code):
    error = refused({"size": 1} | {key: value})
    assert error.code == code
    assert f"top.{key}" in str(error)
    assert error.exit_status == 2


def test_a_missing_required_key_is_named():
    assert "top.size is required" in str(refused({}))
    assert "top.size is required" in str(refused({"size": "???"}))


def test_a_range_error_names_the_key_path_the_value_and_the_rule():
    assert str(refused({"size": 1, "inner": {"count": -2}})) == "top.inner.count must be >= 1, got -2"


def test_a_dataclass_may_raise_its_own_config_error_and_it_names_the_path_too():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Strict:
        count: int = 1

        def __post_init__(self):
            if self.count < 1:
                raise GeometryError(f"Strict.count must be >= 1, got {self.count}")

    error = refused({"count": 0}, Strict)
    assert (str(error), error.code) == ("top.count must be >= 1, got 0", 2010)


def test_a_key_that_the_trainer_gives_is_not_the_recipes():
    error = refused({"_target_": f"{HERE}.Worker", "engine": 3}, Worker)
    assert error.code == 2003
    assert "Worker gets 'engine' from the trainer" in str(error)


def test_checking_makes_no_object_but_config_dataclasses():
    stand_ins.made.clear()
    node = checked({"_target_": f"{HERE}.Worker", "depth": 2, "inner": {"count": 2}}, Worker)
    assert stand_ins.made == []
    worker = build(node, engine="motor", backend="not asked for")
    assert stand_ins.made == ["Worker"]
    assert (worker.engine, worker.seed, worker.depth, worker.inner) == ("motor", 0, 2, Inner(count=2))


def test_wired_parameters_reach_nodes_below():
    node = checked({"_target_": f"{HERE}.Nested", "worker": {"_target_": f"{HERE}.Worker"}}, Nested)
    assert build(node, engine="motor", seed=5).worker.seed == 5


def test_a_wired_parameter_that_nobody_offers_is_named():
    with pytest.raises(ConfigError, match=r"asks the trainer for engine.*offered: seed"):
        build(checked({"_target_": f"{HERE}.Worker"}, Worker), seed=1)


def test_a_refusal_by_a_constructor_gets_the_path_of_its_block():
    node = checked({"_target_": f"{HERE}.Worker", "depth": 0}, Worker)
    with pytest.raises(InvalidValueError, match=r"^top: depth must be >= 1, got 0$"):
        build(node, engine="motor")


def test_a_rule_about_one_key_gets_its_path_and_place():
    where = {"top.low": " (r.yaml:3)", "top.high": " (r.yaml:4)"}
    with pytest.raises(ConfigError) as caught:
        check_node({"low": -1, "high": 2}, Range, "top", PLUGINS, lambda path: where.get(path, ""))
    assert str(caught.value) == "top.low must be >= 0, got -1 (r.yaml:3)"


def test_a_rule_about_two_keys_names_the_places_of_both():
    where = {"top.low": " (r.yaml:3)", "top.high": " (r.yaml:4)"}
    with pytest.raises(ConfigError) as caught:
        check_node({"low": 5, "high": 3}, Range, "top", PLUGINS, lambda path: where.get(path, ""))
    assert str(caught.value) == "top: low=5 must be < high=3 (r.yaml:4) (r.yaml:3)"


def test_a_classmethod_is_a_target_with_keys_of_its_own():
    node = checked({"_target_": f"{HERE}.Worker.shallow", "inner": {"count": 9}}, Worker)
    assert build(node, engine="motor").inner == Inner(count=9)
    assert refused({"_target_": f"{HERE}.Worker.shallow", "depth": 1}, Worker).code == 2003
    assert node.resolved()["_target_"] == f"{HERE}.Worker.shallow"


def test_a_class_that_swallows_any_key_is_not_usable_in_recipes():
    with pytest.raises(PluginError, match=r"Sloppy, .*takes \*\*anything.*keys that are named"):
        checked({"_target_": f"{HERE}.Sloppy"}, stand_ins.Sloppy)


def test_docs_come_from_field_docstrings_and_args_sections():
    assert docs_of(Square)["side"] == "Length in metres."
    assert docs_of(Worker)["depth"] == "how deep to dig, in layers."


def test_the_listing_names_every_key_with_type_and_default():
    lines = {doc.path: doc.line() for doc in list_keys(checked({"size": 1}))}
    assert lines["top.size"] == "top.size: int = 1 (required)"
    assert lines["top.inner.mode"] == "top.inner.mode: fast | slow = 'fast'"
    assert lines["top.steps"] == "top.steps: list of int = []"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Annotated[float, Meta(gt=1)], "float (> 1)"),
        (Annotated[int, Meta(ge=1), Meta(le=65536)] | None, "int (1 <= x <= 65536) | null"),
        (Annotated[float, Meta(gt=0, lt=1)], "float (0 < x < 1)"),
        (tuple[Annotated[int, Meta(ge=1)], ...], "list of int (>= 1)"),
        (Annotated[float, Meta(le=1e9)], "float (<= 1e+09)"),
        (Annotated[str, Meta(min_length=1)], "str"),
    ],
)
def test_the_listing_gives_the_range_of_a_number(annotation, text):
    assert spell(annotation, ranges=True) == text
    assert not set("<>(") & set(spell(annotation))


def test_positional_parameters_are_wired_and_keyword_only_ones_are_keys():
    schema = schema_of(Worker)
    assert dict(schema.wired) == {"engine": True, "seed": False}
    assert list(schema.keys) == ["depth", "inner"]


def test_a_schema_travels_to_another_process_by_the_name_of_its_class():
    """The ranges of its keys cannot be pickled."""
    schema = schema_of(Range)
    assert pickle.loads(pickle.dumps(schema)) is schema

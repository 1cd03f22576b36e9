"""docs/support.md and the README say what the measured support matrix says, and it covers what there is."""

import json

import pytest

from scripts import support_matrix as matrix

RESULT = json.loads(matrix.RESULT.read_text())


def test_the_page_and_the_readme_are_the_measured_result():
    assert matrix.PAGE.read_text() == matrix.page(RESULT), "run scripts/support_matrix.py --render"
    readme = matrix.README.read_text()
    assert readme == matrix.with_summary(readme, RESULT), "run scripts/support_matrix.py --render"


@pytest.mark.parametrize("name", matrix.SECTIONS)
def test_every_row_column_and_engine_was_tried(name):
    section = matrix.SECTIONS[name]
    assert list(RESULT[name]) == list(section.labels)
    for columns in RESULT[name].values():
        assert list(columns) == list(section.columns)
        assert all(list(engines) == list(matrix.ENGINES) for engines in columns.values())
    assert {f"{name}/{row}" for row in section.labels} <= RESULT["measured"].keys()


def test_every_recipe_of_a_trained_family_is_a_row():
    """A folder of models that no row stands for would be support that nobody tried."""
    folders = (matrix.ROOT / "unirl" / "models").glob("*/family.py")
    bundles = {path.parent.name for path in folders if "DiffusersFamily(" in path.read_text()}  # the matrix is of these
    recipes = [(matrix.RECIPES / f"{recipe}.yaml").read_text() for _, recipe in matrix.FAMILIES.values()]
    named = {bundle for bundle in bundles if any(f"unirl.models.{bundle}." in text for text in recipes)}
    assert named == bundles


def test_no_cell_failed_once_it_was_let_start():
    """A cell is yes, or refused beforehand with a reason: nothing breaks in the middle."""
    broken = {
        f"{row}, {column}, {engine}": cell
        for name in matrix.SECTIONS
        for row, columns in RESULT[name].items()
        for column, engines in columns.items()
        for engine, cell in engines.items()
        if not cell["ran"] and "refused" not in cell
    }
    assert broken == {}


@pytest.mark.parametrize("row", matrix.CHAINS)
def test_every_schedule_trains_the_tracks_of_a_network_on_every_engine(row):
    assert all(cell["ran"] for engines in RESULT["tracks"][row].values() for cell in engines.values())


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_grpo_trains_every_family_on_every_engine(family):
    cells = RESULT["cells"][family]
    assert all(cell["ran"] for name in ("Flow-GRPO", "DanceGRPO", "MixGRPO") for cell in cells[name].values())

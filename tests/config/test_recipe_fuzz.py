"""Damaged recipe files are recipes, or end in a short error for the user."""

import string
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import short
from unirl.config.errors import UniRLError, report
from unirl.config.load import load
from unirl.config.recipe_files import find_recipe
from unirl.plan.preflight import preflight

TEXTS = {name: find_recipe(name).path.read_text() for name in ("diffusion/sd3_trainside", "llm/quickstart")}
PIECES = ["", "\t", ": ", "- ", "*a", "&a ", "!!python/object:os.system ", "${a}", "${", "{", "]", "'", "\0", "\r"]
PIECES += ["_target_: os.system", "defaults: [a, _self_]", "null", "? ", "---\n", "<<: ", "\ud7ff", "@", "0x", "1e999"]
pieces = st.sampled_from(PIECES) | st.text(string.printable, max_size=6)
changes = st.lists(
    st.tuples(
        st.integers(0, 9999), st.integers(0, 30), st.sampled_from(PIECES) | st.text(string.printable, max_size=6)
    ),
    min_size=1,
    max_size=6,
)


@short
@given(name=st.sampled_from(sorted(TEXTS)), places=changes)
def test_a_damaged_recipe_file_is_a_recipe_or_a_short_error(name, places):
    text = TEXTS[name]
    for place, removed, put in places:
        at = place * len(text) // 10_000
        text = text[:at] + put + text[at + removed :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.yaml")
        path.write_text(text, newline="")
        try:
            preflight(load(str(path)))
        except UniRLError as error:
            assert error.exit_status in (2, 4)
            assert len(report(error)) < 2000

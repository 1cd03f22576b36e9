"""docs/models.md says what the families' own facts and configurations say."""

import pytest

from scripts.model_page import PAGE, page


@pytest.mark.slow  # counts the parameters of every public checkpoint
def test_the_page_of_models_is_what_the_families_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/model_page.py"

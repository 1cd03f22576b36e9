"""docs/models.md agrees with the facts and configurations of the families."""

import pytest

from scripts.model_page import PAGE, page


@pytest.mark.slow  # counts the parameters of every public checkpoint
def test_the_page_of_models_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/model_page.py"

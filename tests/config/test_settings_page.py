"""docs/settings.md says what the classes say, and covers the keys of every shipped recipe."""

from scripts import settings_page
from unirl.config.key_docs import list_keys
from unirl.config.load import load


def test_the_page_is_what_the_code_gives():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run scripts/settings_page.py"


def test_the_page_has_every_key_of_a_recipe():
    page = settings_page.PAGE.read_text()
    names = {doc.path.rpartition(".")[2] for doc in list_keys(load("diffusion/sd3_nft").root)}
    assert {name for name in names if f"| `{name}` |" not in page} == set()


def test_no_text_on_the_page_is_a_signature_that_python_wrote():
    assert "(*, " not in settings_page.PAGE.read_text()

"""The table of engines in docs/engines.md is that of scripts/engine_matrix.py, and its evidence exists."""

import json

from scripts import engine_matrix as matrix

PACKAGES = json.loads((matrix.ROOT / "benchmarks" / "engine_packages.json").read_text())
RECORDS = {
    "vLLM, OpenAI-compatible servers": "openai",
    "SGLang, language models": "sglang_llm",
    "SGLang, diffusion": "sglang",
    "vLLM-Omni, diffusion": "vllm_omni",
}
"""Engine to its record of the real package's classes."""


def test_the_page_has_the_table():
    page = matrix.PAGE.read_text()
    assert page == matrix.with_table(page), "run scripts/engine_matrix.py"


def test_every_named_test_exists():
    assert matrix.missing() == []


def test_a_contract_is_with_classes_of_the_real_package():
    engines = {name for name, cells in matrix.ENGINES.items() if any(cell.mark == "contract" for cell in cells)}
    assert engines == set(RECORDS)
    assert all(PACKAGES[record]["requests_read"] for record in RECORDS.values())


def test_every_engine_has_a_row():
    folders = {path.parent.name for path in (matrix.ROOT / "unirl/rollout/engine").glob("*/engine.py")} - {"serving"}
    assert folders <= {"trainside", "replica", "recorded", "composed", *RECORDS.values()}

"""Writes the table of engines and their features into docs/engines.md. Each cell names the test that shows it.

    python scripts/engine_matrix.py

ran       the test ran the engine itself, on a CPU. For SGLang and vLLM-Omni: the real program ran once, with tiny
          models on a CPU, and the test reads the record, benchmarks/engine_packages.json.
contract  the engine has run against a fake server alone, whose messages classes of the real package have read.
no        the engine does not have the feature, or refuses it by name.
-         it does not need it: it samples with the trained weights, or from a data set.

Nothing in the table is edited by hand: this file names the evidence, and tests/test_engine_matrix.py looks it up.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- engine matrix: begin -->", "<!-- engine matrix: end -->"
Mark = Literal["ran", "contract", "no", "-"]

FEATURES: Mapping[str, str] = {
    "native": "log-probs of the engine",
    "replay": "log-probs by replay",
    "latents": "latents of steps",
    "start": "initial latents of the trainer",
    "seeds": "a seed for each row",
    "images": "images in prompts",
    "lora": "adapters by sync",
    "full": "all weights by sync",
    "sleep": "sleep",
    "versions": "version in every answer",
    "tracks": "several tracks",
    "abort": "abort and repeat",
}


@dataclass(frozen=True)
class Cell:
    """A cell of the table."""

    mark: Mark
    test: str = ""
    """FILE::FUNCTION below tests/, without .py."""


def ran(test: str) -> Cell:
    return Cell("ran", test)


def contract(test: str) -> Cell:
    return Cell("contract", test)


NO, NOT_NEEDED = Cell("no"), Cell("-")
REPLICA, TEXT = "rollout/test_replica", "rollout/test_replica_text"
SERVE, TOKENS = "rollout/test_transformers_serve", "rollout/test_token_servers"
SGLANG, OMNI = "rollout/test_sglang", "rollout/test_vllm_omni"
LATENTS = "rollout/test_latent_servers"
REAL_LLM = "test_engine_packages::test_the_real_server_was_as_exact_as_two_forwards_in_fp32_are"
REAL_IMAGES = "test_engine_packages::test_the_real_server_reads_images_as_exactly_as_two_forwards_in_fp32_do"
REAL_OPENAI = "test_engine_packages::test_the_real_openai_servers_were_as_exact_as_two_forwards_in_fp32_are"
REAL_SGLANG = "test_engine_packages::test_the_real_diffusion_server_was_as_exact_as_two_forwards_in_fp32_are"
REAL_OMNI = "test_engine_packages::test_the_real_vllm_omni_was_as_exact_as_two_forwards_in_fp32_are"
"""Tests of the records of runs with the real servers."""
PE, UNIFIED, RECORDED = "trainer/test_prompt_enhancer", "trainer/test_unified_model", "rollout/test_recorded"

ENGINES: Mapping[str, Sequence[Cell]] = {
    "trainside": (
        ran("models/test_ar_stage::test_replay_gives_the_log_probs_of_sampling"),
        ran("models/test_families::test_every_toy_passes_check_bundle"),
        ran("models/test_families::test_every_toy_passes_check_bundle"),
        ran("models/test_families::test_the_samples_are_those_of_diffusers"),
        ran("models/test_ar_stage::test_order_and_neighbours_change_no_bit"),
        ran("trainer/test_image_reading::test_the_samples_name_their_images"),
        NOT_NEEDED,
        NOT_NEEDED,
        NOT_NEEDED,
        NOT_NEEDED,
        ran(f"{UNIFIED}::test_the_tree_holds_what_the_two_stages_sample_alone"),
        NOT_NEEDED,
    ),
    "replica": (
        ran(f"{REPLICA}::test_its_samples_are_trainsides_bit_for_bit"),
        ran("rollout/test_check_engine::test_the_replica_passes"),
        ran(f"{REPLICA}::test_its_samples_are_trainsides_bit_for_bit"),
        ran(f"{REPLICA}::test_its_samples_are_trainsides_bit_for_bit"),
        ran("rollout/test_check_engine::test_the_replica_passes"),
        ran("trainer/test_image_reading::test_an_engine_with_weights_of_its_own_samples_the_same_bits"),
        ran(f"{TEXT}::test_its_responses_are_trainsides_token_for_token"),
        ran("distributed/test_weight_sync::test_weights_arrive_bit_for_bit_in_many_buckets"),
        ran(f"{REPLICA}::test_it_sleeps_in_main_memory_and_refuses_to_sample_there"),
        ran("rollout/test_check_engine::test_the_replica_passes"),
        ran(f"{UNIFIED}::test_an_engine_with_weights_of_its_own_samples_the_same_bits"),
        NOT_NEEDED,
    ),
    "recorded": (
        NO,
        NOT_NEEDED,
        ran(f"{RECORDED}::test_latents_are_stored_in_the_trajectory_dtype"),
        NO,
        ran(f"{RECORDED}::test_a_row_depends_neither_on_order_nor_on_neighbours"),
        NO,
        *(NOT_NEEDED for _ in range(4)),
        NO,
        NOT_NEEDED,
    ),
    "composed": (
        ran(f"{PE}::test_a_tree_holds_what_the_two_engines_sample_alone"),
        ran(f"{PE}::test_a_tree_holds_what_the_two_engines_sample_alone"),
        ran(f"{PE}::test_a_tree_holds_what_the_two_engines_sample_alone"),
        ran(f"{PE}::test_a_tree_holds_what_the_two_engines_sample_alone"),
        ran(f"{PE}::test_two_ray_workers_sample_the_bits_of_one_process"),
        NO,
        ran(f"{PE}::test_engines_with_weights_of_their_own_take_turns_and_sample_the_same_bits"),
        ran(f"{PE}::test_engines_with_weights_of_their_own_take_turns_and_sample_the_same_bits"),
        ran(f"{PE}::test_engines_with_weights_of_their_own_take_turns_and_sample_the_same_bits"),
        ran(f"{PE}::test_engines_with_weights_of_their_own_take_turns_and_sample_the_same_bits"),
        ran(f"{PE}::test_a_tree_holds_what_the_two_engines_sample_alone"),
        NOT_NEEDED,
    ),
    "transformers serve": (
        NO,
        ran(f"{SERVE}::test_it_keeps_the_contract_of_an_engine"),
        NO,
        NO,
        ran(f"{SERVE}::test_its_tokens_are_those_of_generate_with_the_same_seed"),
        NO,
        NO,
        ran(f"{SERVE}::test_a_server_that_keeps_old_weights_is_caught"),
        NO,
        ran(f"{SERVE}::test_it_keeps_the_contract_of_an_engine"),
        NO,
        ran(f"{SERVE}::test_a_killed_server_is_restarted_with_its_weights_and_gives_the_same_answers"),
    ),
    "vLLM, OpenAI-compatible servers": (
        ran(REAL_OPENAI),
        ran(REAL_OPENAI),
        NO,
        NO,
        contract(f"{TOKENS}::test_it_keeps_the_contract_of_an_engine"),
        NO,
        NO,
        ran(REAL_OPENAI),
        contract(f"{TOKENS}::test_it_keeps_the_contract_of_an_engine"),
        contract(f"{TOKENS}::test_two_runs_on_one_server_are_told_apart"),
        NO,
        contract(f"{TOKENS}::test_responses_that_are_broken_off_are_asked_for_again"),
    ),
    "SGLang, language models": (
        ran(REAL_LLM),
        ran(REAL_LLM),
        NO,
        NO,
        contract(f"{TOKENS}::test_it_keeps_the_contract_of_an_engine"),
        ran(REAL_IMAGES),
        ran(REAL_LLM),
        ran(REAL_LLM),
        contract(f"{TOKENS}::test_it_keeps_the_contract_of_an_engine"),
        contract(f"{TOKENS}::test_stale_weights_under_a_new_name_are_caught"),
        NO,
        contract(f"{TOKENS}::test_responses_that_are_broken_off_are_asked_for_again"),
    ),
    "SGLang, diffusion": (
        ran(REAL_SGLANG),
        ran(REAL_SGLANG),
        ran(REAL_SGLANG),
        NO,
        contract(f"{SGLANG}::test_an_evaluation_is_the_trainers_own_euler_path_from_the_noise_of_the_seed"),
        NO,
        ran(REAL_SGLANG),
        ran(REAL_SGLANG),
        ran(REAL_SGLANG),
        NO,
        NO,
        contract(f"{LATENTS}::test_samples_that_are_broken_off_are_asked_for_again"),
    ),
    "vLLM-Omni, diffusion": (
        ran(REAL_OMNI),
        ran(REAL_OMNI),
        ran(REAL_OMNI),
        NO,
        contract(f"{OMNI}::test_sampling_settings_reach_the_server"),
        NO,
        ran(REAL_OMNI),
        ran(REAL_OMNI),
        contract(f"{LATENTS}::test_it_keeps_the_contract_of_an_engine"),
        contract(f"{LATENTS}::test_stale_weights_are_caught"),
        NO,
        contract(f"{LATENTS}::test_samples_that_are_broken_off_are_asked_for_again"),
    ),
}
"""Engine to its cells, in the order of FEATURES."""


@cache
def functions_of(file: str) -> frozenset[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing() -> list[str]:
    """The named tests that do not exist."""
    tests = {cell.test for cells in ENGINES.values() for cell in cells if cell.test}
    return sorted(test for test in tests if test.partition("::")[2] not in functions_of(test.partition("::")[0]))


def table() -> str:
    """The table, with a link from each cell to the file of its test."""
    lines = ["| engine | " + " | ".join(FEATURES.values()) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for engine, cells in ENGINES.items():
        assert len(cells) == len(FEATURES), engine
        shown = [_linked(cell) for cell in cells]
        lines.append(f"| {engine} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _linked(cell: Cell) -> str:
    if not cell.test:
        return cell.mark
    file, _, name = cell.test.partition("::")
    return f'[{cell.mark}](../tests/{file}.py "{name}")'


def with_table(page: str) -> str:
    """The page with the new table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    absent = missing()
    if absent:
        raise SystemExit(f"tests that do not exist: {', '.join(absent)}")
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

"""The harness of the benchmarks counts what it says."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import control, families
from benchmarks.harness import memory


def attention(backend):
    """Forward and backward of attention by one implementation."""
    query, key, value = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        scaled_dot_product_attention(query, key, value).sum().backward()


def test_fused_attention_on_a_cpu_counts_its_operations():
    """4 B H L L D forward. The plain implementation has 2 products forward and 4 backward, the fused one repeats 1."""
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert families.counted(lambda: attention(SDPBackend.MATH)) * 1e12 == pytest.approx(6 * product)
    assert families.counted(lambda: attention(SDPBackend.FLASH_ATTENTION)) * 1e12 == pytest.approx(7 * product)


def test_memory_of_work_on_the_cpu_is_measured_also_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory(lambda: torch.zeros(1000)).kept == 4000


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_a_benchmark_with_few_steps_trains_as_many_as_there_are(steps):
    arguments = families.parser().parse_args(["sd3", "--steps", str(steps)])
    chosen = families.settings(families.CASES[0], arguments).resolve_sde_indices(0)
    assert len(chosen) == min(3, steps // 2)


def test_every_recorded_curve_can_be_run_again():
    recorded = json.loads(Path("benchmarks/control.json").read_text())["runs"]
    assert {run["task"] for run in recorded} == set(control.TASKS)

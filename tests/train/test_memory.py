"""The memory of a micro-batch: measured on a small one, extrapolated to a large one, without a trace in the weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.toy import ToyBundle
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.denoising.stage import DiffusionStage
from unirl.testing.emulated_streams import NAME
from unirl.testing.second_device import second_devices
from unirl.testing.toy import toy_track
from unirl.train import stack as stack_module
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.memory import MicroBatchMemory, memory_of, peak_bytes
from unirl.train.stack import TrainStack


def made(algorithm=None, device="cpu", **options):
    bundle = ToyBundle()
    stage = DiffusionStage(bundle.denoiser(), bundle.facts)
    track = toy_track(stage, prompts=4)
    bundle.trainable().to(device)
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
    return TrainStack(backend, algorithm or DiffusionGRPO(kl_coef=0.1), stage, **options), track


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**9), st.integers(1, 10**8), st.integers(1, 300))
def test_the_rows_that_fit_are_the_most_whose_linear_peak_fits(few, more, fixed, each, rows):
    measured = MicroBatchMemory((few, few + more), (fixed + few * each, fixed + (few + more) * each))
    assert measured.rows_that_fit(fixed + rows * each) == rows
    assert measured.rows_that_fit(fixed + (rows + 1) * each - 1) == rows


def test_peaks_that_do_not_grow_set_no_limit():
    assert MicroBatchMemory((1, 2), (100, 100)).rows_that_fit(50) is None


def test_the_peak_of_a_micro_batch_is_the_one_that_its_quarter_and_its_half_predict():
    num_rows = 12
    with second_devices(count=1):
        device = torch.device(NAME, 0)
        stack, track = made(device=device)
        stack.use_micro_rows(num_rows)
        [small] = stack.measure_memory(track)
        rows = track.slice(0, num_rows)
        result = peak_bytes(device, lambda: stack._try(rows, stack_module.START))
    assert small.rows == (num_rows // 4, num_rows // 2)
    assert small.rows_that_fit(result) == pytest.approx(num_rows, rel=0.1)


@pytest.mark.parametrize("algorithm", [DiffusionGRPO(kl_coef=0.1), DiffusionDPO()])
def test_a_measurement_changes_no_bit_of_the_training(algorithm, monkeypatch):
    sizes = []
    monkeypatch.setattr(stack_module, "peak_bytes", lambda device, work: (work(), sizes.append(1))[1] or len(sizes))
    (plain, track), (measured, same) = made(algorithm), made(algorithm)
    measured.use_micro_rows(8)
    assert measured.measure_memory(same) == [MicroBatchMemory((2, 4), (2, 3))]
    measured.use_micro_rows(algorithm.needs.rows_together)
    for stack in (plain, measured):
        stack.train_track(track)
    for name, value in plain.backend.gather().items():
        assert torch.equal(value, measured.backend.gather()[name])
    assert measured.backend.updates == 1


def test_auto_is_the_smallest_legal_size_until_a_run_chooses():
    stack, track = made(DiffusionDPO())
    assert {len(micro) for update in stack._split(track) for micro in update} == {2}
    stack.use_micro_rows(6)
    assert {len(micro) for update in stack._split(track) for micro in update} <= {6, len(track) % 6}


def test_a_cpu_reports_no_memory():
    assert memory_of(torch.device("cpu")).num_bytes is None

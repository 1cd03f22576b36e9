"""What UniRL does with a device: results arrive before they are read, and the host waits as rarely as it can."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.family_cases import CASES, FamilyCase
from unirl.config.errors import DivergenceError
from unirl.distributed.group.rank import RankInfo, running_as
from unirl.distributed.tensor.row_store import RowStore
from unirl.models.base import Bundle
from unirl.models.denoising.decoding import PixelRows
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.models.wan21.family import Wan21Bundle, Wan21Pipeline
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing import family
from unirl.testing.second_device import second_devices
from unirl.testing.toy import toy_facts
from unirl.train.backend.optimizer import move_optimizer
from unirl.types.batch import Batch
from unirl.types.conditions import TextEmbedCondition
from unirl.types.device import CPU, accelerator, move_module, to_host

from .test_recipes import train_a_step

DEVICE = "emulated:0"


@pytest.fixture
def devices():
    with second_devices(count=2) as opened:
        yield opened


def test_a_batch_that_comes_to_the_cpu_has_arrived(devices):
    batch = TextEmbedCondition(embeds=torch.ones(2, 3, 4, device=DEVICE), pooled=torch.ones(2, 4, device=DEVICE))
    assert torch.equal(batch.to("cpu").embeds, torch.ones(2, 3, 4))


def test_a_batch_goes_to_the_device_without_a_wait(devices):
    TextEmbedCondition(embeds=torch.ones(2, 3, 4), pooled=torch.ones(2, 4)).to(DEVICE)
    assert not devices.syncs


@pytest.mark.slow
def test_embeddings_that_are_read_before_they_arrive_stop_the_run(tmp_path, monkeypatch):
    """The defect that this device was made to show, put back."""
    monkeypatch.setattr(Batch, "to", lambda self, device: self.map_tensors(lambda t: t.to(device, non_blocking=True)))
    with pytest.raises(DivergenceError, match="decoded to pixels that are not finite"):
        train_a_step("diffusion/sd3_trainside", tmp_path / "run")


@pytest.mark.slow
def test_decoding_in_a_thread_waits_for_the_latents_and_the_host_for_the_pixels(tmp_path):
    ahead = ("pipeline.decode_ahead=true", "rollout.forward_batch_size=4")
    _, in_turns = train_a_step("diffusion/sd3_trainside", tmp_path / "in_turns", ahead[1])
    _, threaded = train_a_step("diffusion/sd3_trainside", tmp_path / "threaded", *ahead)
    assert threaded["rollout/reward_mean"] == in_turns["rollout/reward_mean"]
    assert threaded["train/grad_norm"] == in_turns["train/grad_norm"]


@pytest.mark.parametrize("name", ["sd3", "wan21"])
def test_pixels_leave_the_device_as_levels_and_cost_one_wait(devices, name):
    bundle, pipeline = (SD3Bundle, SD3Pipeline) if name == "sd3" else (Wan21Bundle, Wan21Pipeline)
    latents = torch.randn(
        6, *((4, 4, 4) if name == "sd3" else (4, 2, 4, 4)), generator=torch.Generator().manual_seed(0)
    )
    expected = pipeline(bundle(path="toy", dtype="fp32"), decode_batch_size=4).decode(latents)
    on_device = pipeline(bundle(path="toy", dtype="fp32", device=torch.device(DEVICE)), decode_batch_size=4)
    there = latents.to(DEVICE)
    on_device.decode(there)  # the first time, the VAE may cache some of its constants
    devices.reset()
    kept = devices.allocated[0]
    decoded = on_device.decode(there)
    assert devices.allocated[0] == kept, "pixels are left on the device"
    assert devices.syncs.total() == 1, "the host waits for more than the last chunk"
    for (field, levels), (_, wanted) in zip(vars(decoded).items(), vars(expected).items(), strict=True):
        if isinstance(levels, torch.Tensor):
            assert levels.dtype is wanted.dtype and levels.device == CPU
            assert (levels.int() - wanted.int()).abs().max() <= 1, f"{field} was read before it had arrived"


def test_a_sample_that_is_not_finite_is_named_instead_of_shown_black(devices):
    pixels = PixelRows(3)
    pixels.put(0, torch.full((2, 3, 2, 2), 0.5, device=DEVICE))
    pixels.put(2, torch.full((1, 3, 2, 2), math.nan, device=DEVICE))
    with pytest.raises(DivergenceError, match=r"sample 'c' was decoded to pixels that are not finite \(1 of 3"):
        pixels.arrived(["a", "b", "c"], 16.0)


def test_many_tensors_reach_the_host_with_one_wait(devices):
    tensors = [torch.full((2,), float(i), device=f"emulated:{i % 2}") for i in range(6)] + [torch.full((2,), 6.0)]
    copies = to_host(tensors)
    assert [copy.tolist() for copy in copies] == [[i, i] for i in range(7)]
    assert devices.syncs.total() == 2  # one for each device


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_module_comes_to_the_host_with_one_wait_and_goes_to_the_device_with_none(devices):
    module, wanted = network(), network().state_dict()
    move_module(module, torch.device(DEVICE))
    assert {tensor.device for tensor in module.state_dict().values()} == {torch.device(DEVICE)}
    assert not devices.syncs
    move_module(module, CPU)
    assert devices.syncs.total() == 1
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.state_dict().items())


class TwoParts(Bundle):
    """A trained module `policy` and a frozen one, `encoder`."""

    def __init__(self, device: torch.device) -> None:
        facts = replace(toy_facts(), trainable_attr="policy")
        super().__init__({"policy": network(), "encoder": network()}, facts, dtype=torch.float32, device=device)

    def stage(self):
        raise NotImplementedError


def test_frozen_weights_stay_in_main_memory_and_are_not_copied_back(devices):
    bundle, wanted = TwoParts(torch.device(DEVICE)), network().state_dict()
    for waits in (1, 0, 0):
        before = devices.allocated[0]
        devices.reset()
        bundle.offload(["encoder"])
        assert devices.syncs.total() == waits
        assert devices.allocated[0] < before
        held = bundle.modules["encoder"].state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in held.items())
        bundle.onload(["encoder"])
        assert torch.equal(
            bundle.modules["encoder"](torch.ones(1, 4, device=DEVICE)).cpu(), network().eval()(torch.ones(1, 4))
        )


def test_trained_weights_are_copied_back_as_they_are_now(devices):
    bundle = TwoParts(torch.device(DEVICE))
    for value in (1.0, 2.0):
        with torch.no_grad():
            bundle.trainable()[0].weight.fill_(value)
        bundle.offload(["policy"])
        assert torch.equal(bundle.trainable()[0].weight, torch.full((4, 4), value))
        bundle.onload(["policy"])


def test_the_moments_of_an_optimizer_come_to_the_host_with_one_wait(devices):
    module = network().to(DEVICE)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.full_like(parameter, 3.0)}
    devices.reset()
    move_optimizer(optimizer, CPU)
    assert devices.syncs.total() == 1
    assert all((state["exp_avg"] == 3.0).all() and state["exp_avg"].device == CPU for state in optimizer.state.values())


def test_the_result_of_a_call_costs_one_wait(devices):
    store = RowStore("worker", device=torch.device(DEVICE))
    result = store.stash({"metrics": [torch.full((), float(i), device=DEVICE) for i in range(50)]})
    assert [value.item() for value in result["metrics"]] == list(range(50))
    assert devices.syncs.total() == 1


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (RankInfo(device=CPU), "cpu"),
        (None, "emulated:0"),
    ],
    ids=["reward placed on the CPU", "outside of a run"],
)
def test_a_scorer_computes_where_it_was_placed(devices, rank, expected):
    if rank is None:
        device = PickScoreRewardScorer().device
    else:
        with running_as(rank):
            device = PickScoreRewardScorer().device
    assert device == torch.device(expected)


def test_a_scorer_on_the_second_device_stays_there(devices):
    with running_as(RankInfo(device=torch.device("emulated:1"))):
        assert PickScoreRewardScorer().device == torch.device("emulated:1")


def test_a_scorer_prepares_images_on_its_device_with_the_bits_of_the_cpu(devices):
    images = torch.randint(0, 256, (3, 3, 40, 56), generator=torch.Generator().manual_seed(0)) / 255
    on_cpu = PickScoreRewardScorer(config=PickScoreSpec(path="toy", device="cpu")).pixels(images)
    on_device = PickScoreRewardScorer(config=PickScoreSpec(path="toy", device="auto")).pixels(images)
    assert on_device.device == torch.device(DEVICE)
    assert torch.equal(on_device.cpu(), on_cpu)


def test_devices_beyond_the_last_wrap_around(devices):
    assert [accelerator(index).index for index in range(4)] == [0, 1, 0, 1]


def test_without_an_accelerator_everything_is_on_the_cpu():
    assert accelerator(3) == CPU


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_host_does_not_wait_in_a_denoising_step(devices, case: FamilyCase):
    bundle_class, pipeline_class = case.classes()
    pipeline = pipeline_class(bundle_class(torch.device(DEVICE), path=case.path, dtype="bf16"))
    params = family.euler(case.sizes[0], case.scales[-1], case.max_sequence_length)
    params = replace(params, kernel=FlowSDEStrategy())
    images = None
    if pipeline.facts.condition_images[0]:
        images = [ConditionImages.of(torch.full((1, 3, params.height, params.width), 0.5))] * 2
    conditions, noise = pipeline.encode(["a red circle", "x"], params, images), NoiseSource(0, "r", 0)

    def waits(num_steps: int) -> Counter[tuple[str, str]]:
        asked = replace(params, num_inference_steps=num_steps)
        pinned = asked.pinned(0, tuple(pipeline.sigmas(asked).tolist()))
        x_T = pipeline.initial_noise(noise, ["a", "b"], pinned)  # noqa: N806
        devices.reset()
        with torch.no_grad():
            pipeline.stage.sample(conditions, x_T, pinned, noise, ["a", "b"])
        return Counter(devices.syncs)

    waits(2)  # the first call fills caches
    assert waits(2) == waits(3)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_cache_costs_one_wait_for_each_forward_that_may_reuse_blocks(devices, passes):
    pipeline = SD3Pipeline(SD3Bundle(torch.device(DEVICE), path="toy", dtype="fp32"))
    params = replace(family.euler((32, 32, 1), 4.5, 16), guidance_passes=passes)
    params = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
    conditions, noise = pipeline.encode(["a red circle", "x"], params), NoiseSource(0, "r", 0)

    def waits(threshold: float | None) -> int:
        x_T = pipeline.initial_noise(noise, ["a", "b"], params)  # noqa: N806
        devices.reset()
        with torch.no_grad():
            asked = replace(params, cache_threshold=threshold)
            pipeline.stage.sample(conditions, x_T, asked, noise, ["a", "b"])
        return devices.syncs.total()

    waits(None)  # the first call fills caches
    assert waits(1e9) - waits(None) == passes * (params.num_inference_steps - 1)

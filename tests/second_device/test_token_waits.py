"""Tokens are sampled ahead of the host: the same tokens as on a CPU, and one wait for eight tokens of all slots."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.models.texts import networks, prompts_of_lengths, sampled, stage_of
from unirl.models.janus_pro.family import JanusProBundle, JanusProPipeline
from unirl.models.language.decoding import Unread
from unirl.models.language.tools import Calculator
from unirl.testing.bundle import request_of
from unirl.testing.emulated_streams import CaptureError, CUDAGraph
from unirl.testing.second_device import second_devices
from unirl.types.sampling import ARSamplingParams, ImageTokenSamplingParams

DEVICE = "emulated:0"
PROMPTS = (5, 40, 1, 3, 70, 12)
PARAMS = ARSamplingParams(max_new_tokens=24)


@pytest.fixture
def devices():
    with second_devices() as opened:
        yield opened


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, min_new_tokens=5, stop=("a", "ek"), top_k=9)])
def test_tokens_are_those_of_a_cpu_although_slots_are_refilled_later(devices, params):
    conditions = prompts_of_lengths(PROMPTS)
    on_cpu = sampled(stage_of(networks()[0]), conditions, params, slots=3)
    here = sampled(stage_of(networks()[0].to(DEVICE)), conditions, params, slots=3).to("cpu")
    assert on_cpu.lengths.unique().numel() > 1
    assert torch.equal(here.tokens, on_cpu.tokens) and torch.equal(here.offsets, on_cpu.offsets)
    assert torch.allclose(here.logp, on_cpu.logp, atol=1e-5)


def test_the_host_waits_once_for_every_eight_tokens_of_all_slots(devices):
    stage, conditions = stage_of(networks()[0].to(DEVICE)), prompts_of_lengths(PROMPTS[:4])

    def cost(count, slots=4):
        devices.reset()
        sampled(stage, conditions, replace(PARAMS, min_new_tokens=count, max_new_tokens=count), slots)
        return devices.syncs.total(), devices.launches.total()

    (few, first), (more, second), (_, third) = cost(8), cost(16), cost(24)
    assert more - few == 1
    assert few <= 5, "besides, for what is the same in both"
    assert third - second <= second - first, "and the launches of a token do not grow with the length"


def test_no_wait_of_the_host_is_for_work_that_it_has_just_launched(devices):
    """While the host reads tokens, the device has a chunk of tokens to sample."""
    stage, conditions = stage_of(networks()[0].to(DEVICE)), prompts_of_lengths(PROMPTS[:4])
    behind = []
    values = Unread.values

    def reading(self):
        behind.append(devices.default_stream(0).done - self.arrived.count)
        return values(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unread, "values", reading)
        sampled(stage, conditions, replace(PARAMS, min_new_tokens=24), slots=4)
    assert len(behind) == 3 and min(behind[:-1]) > 8 * 50 and behind[-1] < 50


@pytest.mark.parametrize("tools", [False, True])
def test_only_answers_of_tools_make_the_host_read_every_token(devices, tools):
    stage = stage_of(networks()[0].to(DEVICE), Calculator() if tools else None)
    devices.reset()
    sampled(stage, prompts_of_lengths(PROMPTS[:4]), replace(PARAMS, min_new_tokens=24), slots=4)
    waits = sum(n for (kind, _), n in devices.syncs.items() if kind == "event.synchronize")
    assert waits == (24 if tools else 3)


@pytest.mark.slow
@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, min_new_tokens=5, stop=("a", "ek"), top_k=9)])
def test_captured_steps_give_the_same_tokens(devices, params):
    """Slots are refilled and compacted between replays, and the width of the cache changes."""
    conditions = prompts_of_lengths((5, 40, 1, 3, 62, 12, 8, 9, 2))
    plain, captured = (sampled(on_device(graphs), conditions, params, slots=8).to("cpu") for graphs in (False, True))
    assert plain.lengths.unique().numel() > 1
    assert torch.equal(captured.tokens, plain.tokens) and torch.equal(captured.offsets, plain.offsets)
    assert torch.equal(captured.logp, plain.logp)


def test_a_captured_step_is_one_launch_and_two_copies(devices):
    """In between, after every eighth token, are the copies to the host."""
    conditions, stage = prompts_of_lengths((5, 40, 1, 62)), on_device(use_cuda_graphs=True)
    replays = []
    replay = CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDAGraph, "replay", lambda graph: replays.append(devices.launches.total()) or replay(graph))
        sampled(stage, conditions, replace(PARAMS, min_new_tokens=24), slots=4)
    assert len(replays) == 24 - 2, "the first step of each of two widths runs by itself"
    assert Counter(later - earlier for earlier, later in pairwise(replays))[3] >= 16


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_guided_images_are_those_of_a_cpu_also_if_steps_are_captured(devices, scale, graphs):
    """Six images in four slots, so that pairs of slots are refilled."""
    params = ImageTokenSamplingParams(max_new_tokens=16, max_prompt_tokens=200, guidance_scale=scale)
    req = request_of(["a cat", "two dogs in a row", "a"], "image", params, 0).expand(2)
    pipelines = (
        JanusProPipeline(JanusProBundle(torch.device(device), path="toy", dtype="fp32"), use_cuda_graphs=graphs)
        for device in ("cpu", DEVICE)
    )
    on_cpu, here = (pipeline.generate(req, 4).tracks["image"] for pipeline in pipelines)
    assert torch.equal(here.segment.tokens.cpu(), on_cpu.segment.tokens)
    assert torch.allclose(here.segment.logp.cpu(), on_cpu.segment.logp, atol=1e-4)
    assert (here.decoded.pixels.int() - on_cpu.decoded.pixels.int()).abs().max() <= 1


def test_a_graph_runs_what_was_captured_on_the_same_memory(devices):
    module = torch.get_device_module(DEVICE)
    values, count = torch.ones(4, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    graph = module.CUDAGraph()
    with module.graph(graph):
        result = values.mul(2).sum() + count
        values[:2].mul_(3)
        count.add_(1)
    assert values.tolist() == [1, 1, 1, 1] and count.item() == 0, "captured work does not run"
    for times in (1, 2):
        before = values.sum().item()
        graph.replay()
        assert values.tolist() == [3**times, 3**times, 1, 1] and count.item() == times
        assert result.item() == 2 * before + times - 1


@pytest.mark.parametrize("work", [lambda t: t.cpu(), lambda t: t[t > 0], lambda t: t.add_(torch.ones(3).to(DEVICE))])
def test_work_that_needs_the_host_cannot_be_captured(devices, work):
    module, values = torch.get_device_module(DEVICE), torch.ones(3, device=DEVICE)
    with pytest.raises(CaptureError), module.graph(module.CUDAGraph()):
        work(values)
    assert values.tolist() == [1, 1, 1]


def on_device(use_cuda_graphs):
    stage = stage_of(networks()[0].to(DEVICE))
    stage.use_cuda_graphs = use_cuda_graphs
    return stage

"""Runtime, sync, sharding and Ray's address against the plan."""

import socket
import time

import pytest

from unirl.config.dependencies import check_ray_address
from unirl.config.errors import DependencyError, UniRLError
from unirl.config.load import load
from unirl.plan.layout import transport_of
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight

TRAINSIDE = "diffusion/sd3_trainside"
COLOCATE = "diffusion/sd3_replica_lora_colocate"
AHEAD = "llm/quickstart_async"
SEPARATE = "diffusion/sd3_replica_lora_separate"
LOCAL = ("scale=toy",)


@pytest.fixture(autouse=True)
def no_ray_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def refused(recipe, *overrides):
    with pytest.raises(UniRLError) as caught:
        preflight(load(recipe, overrides))
    return caught.value


def said(recipe, *overrides):
    return " ".join(preflight(load(recipe, overrides)).notices)


@pytest.mark.parametrize(
    ("recipe", "overrides", "code", "says"),
    [
        (
            TRAINSIDE,
            ["num_devices=8", "runtime=local"],
            2020,
            "Set runtime=ray, which has one worker per device, or set num_devices=1",
        ),
        (
            "diffusion/sd3_replica_full_separate",
            ["sync.merge_adapters=true"],
            2020,
            "trains all weights, not adapters. Remove the key, or set backend.lora_cfg={}",
        ),
        (SEPARATE, ["runtime=local"], 2020, "train has 4 devices (0-3)"),
        # An engine on devices of its own would not help this loss.
        ("diffusion/quickstart_nft", ["asynchronous.max_staleness=1"], 2020, "samples from the snapshot 'old', and"),
        (COLOCATE, ["devices_per_node=3"], 2010, "Use devices_per_node=1|2|4|8"),
        (COLOCATE, ["~sync"], 2020, "Write sync: {_target_: unirl.distributed.weight_sync.sync.EngineSync}"),
        (TRAINSIDE, ["sync._target_=unirl.distributed.weight_sync.sync.EngineSync"], 2020, "Remove the block (~sync)"),
        (SEPARATE, ["sync.transport=cuda_ipc"], 2020, "shares memory of one device"),
        (SEPARATE, ["sync.transport=cuda_ipc"], 2020, "=auto|broadcast|ray, or placement.rollout=0-3"),
        (COLOCATE, [*LOCAL, "sync.transport=cuda_ipc"], 2020, "Use sync.transport=auto|in_process, or runtime=ray"),
        (
            COLOCATE,
            ["sync.transport=cuda_ipc", "row_transport=collective"],
            2020,
            "Use row_transport=object_store, or sync.transport=in_process",
        ),
        (TRAINSIDE, ["+transfer_queue=simple"], 2020, "Set runtime=ray, or leave transfer_queue out"),
        (COLOCATE, ["transfer_queue=simple", "row_transport=collective"], 2020, "two ways for the same rows"),
        (SEPARATE, ["sync.transport=in_process"], 2020, "needs both roles in one process"),
        (COLOCATE, ["sync.transport=broadcast"], 2020, "Use sync.transport=auto|in_process|cuda_ipc, or"),
        (SEPARATE, [*LOCAL, "sync.transport=broadcast"], 2020, "Use sync.transport=auto|in_process"),
        (
            SEPARATE,
            ["backend.fsdp_cfg.shard_size=3"],
            2010,
            "does not divide the 4 ranks that train. Use one of 1, 2, 4",
        ),
        (
            "llm/quickstart",
            ["num_devices=2", "pipeline.use_cuda_graphs=true", "rollout.gather_weights=false"],
            2020,
            "Use pipeline.use_cuda_graphs=false, or rollout.gather_weights=true",
        ),
        (SEPARATE, ["backend.topology.dp=8"], 2010, "topology.dp=8, but 4 ranks train"),
        (SEPARATE, ["backend.topology.tp=2"], 2020, "topology.tp=2 is not available"),
        (
            SEPARATE,
            ["num_devices=6", "placement={train: 0-2, rollout: 3-5}"],
            2010,
            "2|4 devices in placement.train",
        ),
    ],
)
def test_what_the_plan_cannot_have_is_refused_with_the_way_out(recipe, overrides, code, says):
    error = refused(recipe, *overrides)
    assert error.code == code
    assert says in str(error)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (TRAINSIDE, ["runtime=ray"]),
        (TRAINSIDE, ["runtime=ray", "num_devices=8", "devices_per_node=4"]),
        (COLOCATE, ["backend.fsdp_cfg.shard_size=4", "backend.topology.dp=8"]),
        (SEPARATE, ["sync.transport=ray"]),
        (COLOCATE, ["sync.transport=cuda_ipc"]),
        (COLOCATE, [*LOCAL, "runtime=ray", "sync.transport=cuda_ipc"]),
        (SEPARATE, [*LOCAL, "sync.transport=in_process"]),
        (SEPARATE, ["placement.reward=cpu x2"]),
    ],
)
def test_what_the_plan_can_have_may_start(recipe, overrides):
    preflight(load(recipe, overrides))


@pytest.mark.parametrize(
    ("recipe", "overrides", "transport"),
    [
        (TRAINSIDE, [], "none"),
        (COLOCATE, [], "in_process"),
        (SEPARATE, [], "broadcast"),
        (SEPARATE, LOCAL, "in_process"),
        (SEPARATE, ["sync.transport=ray"], "ray"),
        (COLOCATE, ["sync.transport=cuda_ipc"], "cuda_ipc"),
    ],
)
def test_the_way_of_the_weights_follows_from_the_plan(recipe, overrides, transport):
    config = load(recipe, overrides).config
    assert transport_of(config, plan_of(config)) == transport


def test_the_devices_that_train_divide_an_update_and_those_that_sample_need_not():
    layout = ("num_devices=7", "placement={train: 0-3, rollout: 4-6}")
    result = preflight(load(SEPARATE, layout))
    assert result.geometry.rows_per_device == 256 // 2 // 4
    assert "rollout has 3 devices, which do not divide the 256 samples: 2 padding rows" in " ".join(result.notices)
    assert not preflight(load(SEPARATE)).notices


def test_settings_without_effect_are_said(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS is set and has no effect" in said(TRAINSIDE)
    assert "devices_per_node=1 has no effect" in said(TRAINSIDE, "devices_per_node=1")
    assert "fewer steps than max_staleness=2" in said(
        AHEAD, "asynchronous={order: free, steps_ahead: 1, max_staleness: 2}"
    )
    assert "weight_sync_interval=3 has no effect" in said(TRAINSIDE, "weight_sync_interval=3")
    sharded = "rollout.gather_weights=false"
    assert f"{sharded} has no effect: every device" in said(TRAINSIDE, sharded)
    assert sharded not in said(TRAINSIDE, sharded, "num_devices=2")
    assert "up to 2 steps old" in said(SEPARATE, *LOCAL, "weight_sync_interval=3")


def test_an_allocator_that_may_not_share_its_memory_is_said(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "asks for expandable_segments" in said(COLOCATE, "sync.transport=cuda_ipc")
    assert not said(COLOCATE)


def test_a_ray_that_does_not_answer_is_refused_within_seconds(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused for as long as the test runs
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        start = time.monotonic()
        error = refused(COLOCATE)
        assert time.monotonic() - start < 30
    assert isinstance(error, DependencyError)
    assert error.code == 3003
    assert "unset it" in str(error)


@pytest.mark.parametrize("address", ["nonsense", "host:port", "127.0.0.1:99999", ":6379", "ray://"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(DependencyError, match=r"is not HOST:PORT"):
        check_ray_address(address)


def test_an_address_that_answers_or_names_no_machine_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_ray_address(f"127.0.0.1:{port}")
    for word in ("", "auto", "local"):
        check_ray_address(word)


@pytest.mark.parametrize(
    ("recipe", "overrides", "runtime"),
    [
        (TRAINSIDE, [], "local"),
        (TRAINSIDE, ["num_devices=8"], "ray"),
        (TRAINSIDE, ["num_devices=1", "runtime=ray"], "ray"),
        (SEPARATE, [], "ray"),
        (SEPARATE, ["scale=toy"], "local"),
        (SEPARATE, ["scale=toy", "num_devices=4"], "ray"),
    ],
)
def test_the_runtime_follows_from_the_devices(recipe, overrides, runtime) -> None:
    config = load(recipe, overrides).config
    assert config.runtime_in_use == runtime

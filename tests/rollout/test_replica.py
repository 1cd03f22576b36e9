"""The replica engine samples what the trainer would have sampled, bit for bit, from weights that were proven."""

import pytest
import torch

from tests.models.rollouts import request_for, sampling
from tests.sync_ends import LORA, Ends, ends, toy_pipeline
from unirl.config.errors import SyncError
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.testing.toy import toy_request
from unirl.types.fp8 import Fp8Linear, packed, quantized
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack


def sd3_pipeline() -> SD3Pipeline:
    return SD3Pipeline(SD3Bundle(path="toy", dtype="fp32"))


def asking(joined: Ends, weights: str = "live") -> RolloutReq:
    is_sd3 = isinstance(joined.trained, SD3Pipeline)
    req = request_for(sampling(joined.trained)) if is_sd3 else toy_request(3)
    return req.from_weights(weights, joined.backend.updates)


def trainside(joined: Ends, req: RolloutReq) -> RolloutTrack:
    return TrainsideRolloutEngine(joined.trained, joined.backend).generate(req).tracks["image"]


def assert_same(ours: RolloutTrack, theirs: RolloutTrack) -> None:
    assert ours.sample_ids == theirs.sample_ids
    assert torch.equal(ours.segment.latents, theirs.segment.latents)
    assert torch.equal(ours.segment.logp, theirs.segment.logp)
    assert torch.equal(ours.decoded.pixels, theirs.decoded.pixels)
    assert torch.equal(ours.weight_version, theirs.weight_version)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("pipeline", [toy_pipeline, sd3_pipeline], ids=["toy", "sd3"])
def test_its_samples_are_trainsides_bit_for_bit(pipeline, lora) -> None:
    joined = ends(lora, pipeline)
    for _ in range(2):
        joined.train()
        report = joined.sync.push(joined.backend.updates)
        assert report.num_bytes > 0 and report.canary_absdiff == 0.0
        req = asking(joined)
        assert_same(joined.engine.generate(req).tracks["image"], trainside(joined, req))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_snapshot_reaches_the_engine_by_its_name(lora) -> None:
    joined = ends(lora)
    joined.train()
    joined.backend.snapshot("old")
    joined.train()
    joined.sync.push(2, "old")
    req = asking(joined, "old")
    theirs = trainside(joined, req)
    assert_same(joined.engine.generate(req).tracks["image"], theirs)
    assert not torch.equal(trainside(joined, asking(joined)).segment.latents, theirs.segment.latents)


def test_it_samples_from_no_other_weights_than_were_asked_for() -> None:
    joined = ends()
    with pytest.raises(SyncError, match=r"asks for weights of version 0 \(live\), but the engine has no verified weig"):
        joined.engine.generate(asking(joined))
    joined.sync.push(0)
    with pytest.raises(SyncError, match=r"version 0 \(ema\), but the engine has version 0 \(live\): push them first"):
        joined.engine.generate(asking(joined, "ema"))
    joined.train()
    with pytest.raises(SyncError, match=r"version 1 \(live\), but the engine has version 0"):
        joined.engine.generate(asking(joined))


def test_it_sleeps_in_main_memory_and_refuses_to_sample_there() -> None:
    joined = ends()
    joined.sync.push(0)
    joined.engine.sleep()
    joined.engine.sleep()
    with pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
        joined.engine.generate(asking(joined))
    joined.train()
    with pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
        joined.sync.push(1)
    joined.engine.wake_up()
    joined.sync.push(1)
    assert joined.engine.generate(asking(joined)).tracks["image"].weight_version.unique().tolist() == [1]


def test_its_network_is_stored_and_computed_in_its_dtype() -> None:
    joined = ends(engine={"dtype": "bf16"})
    joined.sync.push(0)
    dtypes = {name: p.dtype for name, p in joined.network.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name} == {torch.float32}
    ours = joined.engine.generate(asking(joined)).tracks["image"].segment.final
    theirs = trainside(joined, asking(joined)).segment.final
    assert 0.0 < float((ours - theirs).abs().max()) < 0.5


def test_forwards_of_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="forward_batch_size must be >= 1, got 0"):
        ends(engine={"forward_batch_size": 0})


# --- weights in eight bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"merge_adapters": True}, {"wire_dtype": "bf16"}])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_weights_that_arrive_are_stored_in_eight_bits_and_their_arrival_is_proven(lora, keys) -> None:
    if lora is None and "merge_adapters" in keys:
        return
    joined = ends(lora, sd3_pipeline, engine={"weight_dtype": "fp8"}, **keys)
    for _ in range(2):
        joined.train()
        report = joined.sync.push(joined.backend.updates)
        assert report.canary_absdiff > 0.0
    layers = {name: layer for name, layer in joined.network.named_modules() if isinstance(layer, Fp8Linear)}
    assert layers and all("transformer_blocks" in name for name in layers)
    trained = dict(joined.backend.module.named_parameters())
    if "merge_adapters" in keys:
        trained |= dict(joined.backend.named_tensors("merged"))
    for name, layer in layers.items():
        wanted = trained[f"{name}.weight"].detach()
        wanted = wanted.bfloat16() if "wire_dtype" in keys and lora is None else wanted
        assert torch.equal(layer.stored_bytes(), packed(*quantized(wanted))), name
    assert all(p.dtype == torch.float32 for name, p in joined.network.named_parameters() if "lora" in name)


def test_an_adapter_acts_in_full_on_weights_in_eight_bits() -> None:
    """The difference that an update of the adapter makes to a layer is that of the adapter alone."""
    joined = ends(LORA, sd3_pipeline, engine={"weight_dtype": "fp8"})
    joined.sync.push(0)
    mine, theirs = (net.transformer_blocks[0].attn.to_q for net in (joined.network, joined.backend.module))
    x = torch.randn(3, mine.base_layer.in_features)
    with torch.no_grad():
        torch.testing.assert_close(mine(x) - mine.base_layer(x), theirs(x) - theirs.base_layer(x))
        joined.train()
        joined.sync.push(1)
        torch.testing.assert_close(mine(x) - mine.base_layer(x), theirs(x) - theirs.base_layer(x))
        assert (mine(x) - mine.base_layer(x)).abs().max() > 1e-3


def test_a_byte_of_a_quantised_tensor_that_differs_is_found() -> None:
    joined = ends(None, sd3_pipeline, engine={"weight_dtype": "fp8"})
    joined.sync.push(0)
    joined.train()
    arrival = joined.engine.arrival

    def damaged():
        layer = next(layer for layer in joined.network.modules() if isinstance(layer, Fp8Linear))
        layer.scales[0] *= 2
        return arrival()

    joined.engine.arrival = damaged
    with pytest.raises(SyncError, match="did not arrive as it was sent"):
        joined.sync.push(1)


def test_samples_of_weights_in_eight_bits_do_not_depend_on_the_rows_of_a_forward() -> None:
    def final(rows: int) -> torch.Tensor:
        joined = ends(LORA, sd3_pipeline, engine={"weight_dtype": "fp8", "forward_batch_size": rows})
        joined.sync.push(0)
        return joined.engine.generate(asking(joined)).tracks["image"].segment.final

    assert torch.equal(final(4), final(8))

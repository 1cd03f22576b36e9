"""The check of engines passes ours and catches each broken promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.rollouts import request_for, sampling
from tests.rollout.test_replica import sd3_pipeline
from tests.rollout.test_replica_text import qwen_pipeline
from tests.sync_ends import LORA, toy_pipeline
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.language import text_request
from unirl.testing.toy import toy_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp

REQUESTS = {
    toy_pipeline: lambda trained: toy_request(2),
    qwen_pipeline: lambda trained: text_request(2),
    sd3_pipeline: lambda trained: request_for(sampling(trained)),
}


def check(engine: type[ReplicaRolloutEngine], make: Any = toy_pipeline, lora: Any = LORA, **keys: Any) -> None:
    trained = make()
    backend = FSDPBackend(trained.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)
    req = REQUESTS[make](trained)
    check_engine(engine(make()), trained, backend, req, **keys)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_replica_passes(lora: Any) -> None:
    check(ReplicaRolloutEngine, lora=lora)


@pytest.mark.slow
def test_the_replica_of_an_sd3_passes() -> None:
    check(ReplicaRolloutEngine, sd3_pipeline)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_replica_of_a_language_model_passes(lora: Any) -> None:
    check(ReplicaRolloutEngine, qwen_pipeline, lora)


def test_merged_adapters_pass_within_rounding() -> None:
    check(ReplicaRolloutEngine, merge_adapters=True, atol=1e-2)


class Gullible(ReplicaRolloutEngine):
    def generate(self, req: RolloutReq) -> RolloutResp:
        return self.sample(req)


class Drifting(ReplicaRolloutEngine):
    def sample(self, req: RolloutReq) -> RolloutResp:
        resp = super().sample(req)
        resp.tracks["image"].segment.logp.add_(1e-6)
        return resp


class Forgetful(ReplicaRolloutEngine):
    def move(self, asleep: bool) -> None:
        super().move(asleep)
        with torch.no_grad():
            self.network.get_parameter("output_layer.weight").mul_(0.5)


class Shuffling(ReplicaRolloutEngine):
    def sample(self, req: RolloutReq) -> RolloutResp:
        resp = super().sample(req)
        return RolloutResp({"image": resp.tracks["image"].select(list(reversed(range(len(req)))))})


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (Gullible, "Gullible samples from weights before it has received any"),
        (Drifting, "Drifting: log-probs differ by .* from trainside's with the initial weights"),
        (Forgetful, "Forgetful: samples differ after sleep and wake_up"),
        (Shuffling, "Shuffling: rows are not in the order of the request"),
    ],
)
def test_a_broken_promise_is_named(engine: type[ReplicaRolloutEngine], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check(engine)

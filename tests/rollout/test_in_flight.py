"""New weights for a server that answers requests: they are waited for, asked again, or go on with the new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.fake_servers import sglang as fake
from tests.served_tokens import ATOL, FAKE, LORA, Served, serving
from unirl.config.errors import IncompatibleError, SyncError
from unirl.config.http import RequestFailed
from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.openai.transformers_serve import TransformersServeEngine
from unirl.rollout.engine.serving import in_flight
from unirl.rollout.engine.serving.in_flight import Gate, InFlight, InterruptedByTransfer
from unirl.rollout.engine.sglang.engine import SGLangRolloutEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniRolloutEngine
from unirl.testing.language import text_params
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import TextSegment

LONG = {"max_new_tokens": 40, "temperature": 1.0}
"""Responses that take about a second each, eight of twelve at a time."""


def rows_of(values: torch.Tensor, segment: TextSegment) -> list[list[float]]:
    return [row.tolist() for row in values.split(segment.lengths.tolist())]


def pushed_meanwhile(served: Served) -> RolloutTrack[TextSegment]:
    """The samples of a rollout during which new weights are sent."""
    tracks: list[RolloutTrack[TextSegment]] = []
    req = served.asking(**LONG)
    rollout = threading.Thread(
        target=lambda: tracks.append(served.engine.generate(req).tracks["text"].sampled_as(TextSegment))
    )
    rollout.start()
    while served.engine.gate.num_running < 8:
        time.sleep(0.005)
    time.sleep(0.1)
    served.train()
    served.push()
    rollout.join()
    return tracks[0]


@pytest.mark.parametrize("mode", ["drain", "abort", "pause"])
def test_a_transfer_loses_no_request_and_every_row_names_its_weights(tmp_path: Path, mode: InFlight) -> None:
    with fake() as url, serving(SGLangLLMRolloutEngine, tmp_path, **FAKE, url=url, in_flight=mode) as served:
        served.push()
        former = served.tokens(served.asking(**LONG))
        weights = {name: each.detach().clone() for name, each in served.backend.trainable.items()}
        track = pushed_meanwhile(served)
        latter = served.tokens(served.asking(**LONG))
        with torch.no_grad():
            new = rows_of(served.trained.stage.replay(track.conditions, track.segment).logp, track.segment)
            for name, each in served.backend.trainable.items():
                each.copy_(weights[name])
            old = rows_of(served.trained.stage.replay(track.conditions, track.segment).logp, track.segment)
    tokens, versions = rows_of(track.segment.tokens, track.segment), track.weight_version.tolist()
    assert len(tokens) == 12 and served.engine.gate.num_running == 0
    whole = [
        row == (latter if version else former)[i] for i, (row, version) in enumerate(zip(tokens, versions, strict=True))
    ]
    logps = rows_of(track.segment.logp, track.segment)
    if mode == "drain":  # the rows that waited are sampled after the transfer
        assert all(whole) and versions.count(0) >= 8 and versions.count(1) >= 1
    if mode == "abort":
        assert all(whole) and versions.count(1) >= 8
    if mode == "pause":
        mixed = [row for row, is_whole in enumerate(whole) if not is_whole]
        assert mixed and all(versions[row] == 0 for row in mixed)
        for row in mixed:
            assert scored_by_one_and_then_the_other(logps[row], old[row], new[row])


def scored_by_one_and_then_the_other(logps: Sequence[float], old: Sequence[float], new: Sequence[float]) -> bool:
    """True if the log-probs are those of the old weights up to some token, and those of the new ones from there on."""
    olds, news = ([abs(a - b) < ATOL for a, b in zip(logps, other, strict=True)] for other in (old, new))
    return any(all(olds[:place]) and all(news[place:]) for place in range(1, len(logps)))


def test_requests_wait_while_a_transfer_is_under_way() -> None:
    gate, passed = Gate(), threading.Event()
    gate.close()

    def attempt() -> None:
        with gate.passing():
            passed.set()

    thread = threading.Thread(target=attempt)
    thread.start()
    assert not passed.wait(0.1)
    gate.open()
    thread.join()
    assert passed.is_set() and gate.num_running == 0


def test_an_attempt_that_a_transfer_broke_off_is_told_from_one_that_failed() -> None:
    gate = Gate()
    with pytest.raises(RequestFailed), gate.passing():
        raise RequestFailed("the connection closed")
    with pytest.raises(InterruptedByTransfer), gate.passing():
        gate.close()
        raise RequestFailed("aborted")


def test_nobody_waits_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(in_flight, "WAIT_S", 0.05)
    gate = Gate()
    with gate.passing(), pytest.raises(SyncError, match=r"waited 0\.05 s for 1 answers\. Set rollout\.in_flight=abort"):
        gate.wait_idle()
    gate.close()
    with pytest.raises(SyncError, match="for the end of a transfer of weights, which never came"), gate.passing():
        pass


@pytest.mark.parametrize("engine", [SGLangRolloutEngine, VLLMOmniRolloutEngine, TransformersServeEngine])
@pytest.mark.parametrize("mode", ["abort", "pause"])
def test_what_a_server_cannot_do_is_refused_by_name(engine, mode) -> None:
    says = rf"rollout\.in_flight={mode}: {engine.server_class.name} cannot {mode} the requests .* Use drain"
    with pytest.raises(IncompatibleError, match=says):
        engine.check_settings(text_params(), {"in_flight": mode})


def test_a_request_cannot_go_on_with_another_adapter(tmp_path: Path) -> None:
    """When the recipe is checked, and when an engine is used without a recipe."""
    use = EngineUse(num_devices=1, adapter_alpha=8.0, model_path=None, num_weights=2)
    settings = {"in_flight": "pause", "url": None}
    with pytest.raises(IncompatibleError, match=r"Use drain or abort, or set sync\.merge_adapters=true"):
        SGLangLLMRolloutEngine.check_use(settings, use)
    served = Served.at(SGLangLLMRolloutEngine, tmp_path, **FAKE, lora=LORA, in_flight="pause")
    with pytest.raises(IncompatibleError, match=r"rollout\.in_flight=pause: a request names its adapter"):
        served.push()

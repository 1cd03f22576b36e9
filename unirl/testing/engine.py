"""The check of a dedicated engine: it must sample as the trainside engine does from the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import SyncError
from unirl.distributed.group.base import Pool
from unirl.distributed.group.handle import Handle, Remote
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.base import Pipeline
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.language.pipeline import TextPipeline
from unirl.rollout.engine.base import DedicatedEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.base import TrainBackend
from unirl.types.batch import Batch, Kind, same
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment, Segment, TextSegment

SNAPSHOT = "check"
MAX_SCORE = 4.5
"""Largest standard score of the tokens of a server. A right server exceeds it in one check of 150,000."""


def check_engine(
    engine: DedicatedEngine,
    pipeline: Pipeline,
    backend: TrainBackend,
    req: RolloutReq,
    *,
    atol: float = 0.0,
    **sync_keys: Any,
) -> None:
    """Raises AssertionError, in a sentence, unless `engine` samples as the trainside engine does.

    It refuses to sample from weights that it has not received. After a push, its trajectories or tokens, log-probs and
    decoded samples equal those of the trainside engine within `atol`: before an update, after it, and from a snapshot.
    Rows have the requested weight version and repeat the sampling settings. The bits of a row do not depend on order or
    on other rows. sleep and wake_up change nothing.

    A server draws its own random numbers (`Capabilities.remote`), so its tokens are others. They must be likely draws
    from the trained policy, and the log-probs that it reports must equal those of the trainer's replay within `atol`.

    Args:
        engine: a new engine in this process.
        pipeline: a pipeline over the trained bundle, on one rank.
        backend: the backend that trains the bundle. The check changes its weights.
        req: a request with pinned settings, at least three rows and one track.
        sync_keys: further arguments of `EngineSync`.
    """
    assert engine.capabilities.dedicated, (
        f"{type(engine).__name__} has no weights of its own (capabilities.dedicated is False), so there is nothing to "
        "compare with the trainside engine"
    )
    assert len(req) >= 3, f"check_engine needs at least 3 rows, got {len(req)}"
    trainside = TrainsideRolloutEngine(pipeline, backend)
    with closing(open_pool("local", 2, deadline_s=600.0)) as pool:
        sender = _placed(pool, 0, "sender", WeightSender(backend, pipeline.stage, engine))
        sync = EngineSync(sender, _placed(pool, 1, "rollout", engine), **sync_keys)
        EngineCheck(engine, trainside, backend, req, atol, sync).run()


def _placed(pool: Pool, device: int, name: str, role: object) -> Handle:
    group = pool.group(DeviceSet("device", (device,)))
    return group.place(Remote(name, lambda siblings: role))


@dataclass
class EngineCheck:
    engine: DedicatedEngine
    trainside: TrainsideRolloutEngine
    backend: TrainBackend
    req: RolloutReq
    atol: float
    sync: EngineSync

    @property
    def name(self) -> str:
        return type(self.engine).__name__

    def run(self) -> None:
        self.refuses(self.asking("live"), "before it has received any")
        self.sync.push(self.backend.updates)
        self.samples_as_trainside("live", "with the initial weights")
        self.backend.snapshot(SNAPSHOT)
        self.update()
        self.refuses(self.asking("live"), "of an update that was not pushed")
        self.sync.push(self.backend.updates)
        self.samples_as_trainside("live", "after an update")
        self.keeps_row_bits()
        self.survives_sleep()
        if self.engine.capabilities.snapshots:
            self.sync.push(self.backend.updates, SNAPSHOT)
            self.samples_as_trainside(SNAPSHOT, "from a snapshot")
            self.refuses(self.asking("live"), "while it holds a snapshot")

    def asking(self, weights: str) -> RolloutReq:
        return self.req.from_weights(weights, self.backend.updates)

    def sampled(self, req: RolloutReq) -> RolloutTrack:
        [track] = self.engine.generate(req).tracks.values()
        return track

    def segment(self, req: RolloutReq) -> Segment:
        """The segment that the engine samples, with zeros as log-probs if it reports none."""
        segment = self.sampled(req).segment
        return (
            segment
            if self.engine.capabilities.old_logp == "native"
            else segment.replace(logp=torch.zeros_like(segment.logp))
        )

    @torch.no_grad()
    def update(self) -> None:
        """Changes every trainable weight."""
        generator = torch.Generator().manual_seed(0)
        for parameter in self.backend.trainable.values():
            parameter.add_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator).to(parameter.device))
        self.backend.updates += 1

    def refuses(self, req: RolloutReq, when: str) -> None:
        try:
            self.engine.generate(req)
        except SyncError:
            return
        raise AssertionError(f"{self.name} samples from weights {when}: it must raise SyncError")

    def samples_as_trainside(self, weights: str, when: str) -> None:
        req = self.asking(weights)
        ours = self.sampled(req)
        assert ours.sample_ids == list(req.sample_ids), f"{self.name}: rows are not in the order of the request {when}"
        versions = set(ours.weight_version.tolist())
        assert versions == {req.weight_version}, (
            f"{self.name}: rows have the weight versions {versions}, not {req.weight_version}"
        )
        assert ours.decoded is not None, f"{self.name} decodes nothing"
        if self.engine.capabilities.remote and "text" in self.engine.capabilities.modalities:
            self.is_likely(ours.sampled_as(TextSegment), weights, when)
        elif self.engine.capabilities.remote:
            self.replays(ours.sampled_as(LatentSegment), weights, when)
        else:
            self.equals_trainside(req, ours, when)

    def is_likely(self, track: RolloutTrack[TextSegment], weights: str, when: str) -> None:
        """Tokens are draws from the trainer's distributions p_i, of entropy H_i.

        The terms -log p_i(token_i) - H_i have the mean 0 under the policy, whatever came before, so that their sum
        divided by the root of the sum of their squares is close to a standard normal number.
        """
        trained = self.trainside.pipeline
        assert isinstance(trained, TextPipeline)
        named = nullcontext() if weights == "live" else self.backend.weights(weights)
        with torch.no_grad(), named, self.backend.sampling():
            replay = trained.stage.replay(track.conditions, track.segment, entropy=True)
        assert replay.entropy is not None
        surprise = (-replay.logp - replay.entropy).double()
        score = float(surprise.sum() / surprise.square().sum().sqrt())
        assert abs(score) < MAX_SCORE, (
            f"{self.name}: its {len(surprise)} tokens are unlikely draws from the trained policy {when}: a score of "
            f"{score:.1f}, where {MAX_SCORE:g} is allowed. It samples from other weights or at another temperature"
        )
        if self.engine.capabilities.old_logp == "native":
            self.assert_close("logp", Kind.PACKED, track.segment.logp, replay.logp, f"from the trainer's replay {when}")

    def replays(self, track: RolloutTrack[LatentSegment], weights: str, when: str) -> None:
        """The engine's log-probs, which are those of its noise, equal the trainer's replay of its latents.

        The replay computes the noise from the latents, the means of the trained policy and their standard deviations,
        so that equality says that the latents are those means with that noise.
        """
        trained = self.trainside.pipeline
        assert isinstance(trained, DiffusionPipeline)
        named = nullcontext() if weights == "live" else self.backend.weights(weights)
        steps = track.segment.sde_indices
        with torch.no_grad(), named, self.backend.sampling():
            replay = trained.stage.replay(track.conditions, track.segment, steps)
        self.assert_close("logp", Kind.ROW, track.segment.logp, replay.logp, f"from the trainer's replay {when}")

    def equals_trainside(self, req: RolloutReq, ours: RolloutTrack, when: str) -> None:
        [theirs] = self.trainside.generate(req).tracks.values()
        assert ours.decoded is not None and theirs.decoded is not None
        for batch, other in ((ours.segment, theirs.segment), (ours.decoded, theirs.decoded)):
            for field, kind, a, b in values_of(batch, other):
                self.assert_close(field, kind, a, b, f"from trainside's {when}")

    def keeps_row_bits(self) -> None:
        req = self.asking("live")
        whole = self.segment(req)
        backwards = list(reversed(range(len(req))))
        for rows in (backwards, backwards[:1]):
            part = self.segment(req.select(rows))
            assert equal(part, whole.select(rows)), (
                f"{self.name}: the bits of a row depend on its position or on other rows"
            )

    def survives_sleep(self) -> None:
        req = self.asking("live")
        before = self.segment(req)
        self.engine.sleep()
        self.engine.wake_up()
        self.sync.push(self.backend.updates)  # for an engine that has lost its weights
        assert equal(self.segment(req), before), f"{self.name}: samples differ after sleep and wake_up"

    def assert_close(self, field: str, kind: Kind, ours: object, theirs: object, when: str) -> None:
        """Per-row numbers agree within the tolerance; all other fields are equal."""
        if field == "logp" and self.engine.capabilities.old_logp != "native":
            return
        what = "log-probs" if field == "logp" else field
        if kind in (Kind.SHARED, Kind.OFFSETS) or not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            assert same(ours, theirs), f"{self.name}: {what} must be those of the request, and differ {when}"
            return
        assert ours.shape == theirs.shape, f"{self.name}: {what} of {list(ours.shape)} {when}, not {list(theirs.shape)}"
        scale = 255 if ours.dtype is torch.uint8 else 1  # levels of pixels in [0, 1]
        gap = float((ours.float() - theirs.to(ours.device).float()).abs().max()) / scale
        assert gap <= self.atol, f"{self.name}: {what} differ by {gap:.3g} {when} ({self.atol:g} is allowed)"


def values_of(batch: Batch, other: Batch) -> Iterator[tuple[str, Kind, object, object]]:
    """(name, kind, value in `batch`, value in `other`) of every field."""
    for name, kind in batch.kinds().items():
        yield name, kind, vars(batch)[name], vars(other)[name]


def equal(batch: Batch, other: Batch) -> bool:
    """True if all fields are equal, bit for bit."""
    return all(same(a, b) for _, _, a, b in values_of(batch, other))

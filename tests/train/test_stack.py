"""The stack's arithmetic: one division, so that no way of cutting the work changes the gradient."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toy import ToyBundle
from unirl.algorithms.base import START, LossResult, Part, PolicyOutputs, StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.errors import ConfigError, DivergenceError
from unirl.models.denoising.stage import DiffusionStage
from unirl.testing.toy import toy_stage, toy_track
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.train.stack import TrainStack, merge_ranks
from unirl.types.protocols import Anchor, TrainingProgress
from unirl.types.results import Metrics, TrainStepResult, values
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment


@dataclass
class Setup:
    """A stack on a fresh toy, and a rollout of it."""

    stack: TrainStack
    backend: FSDPBackend
    track: RolloutTrack


def make(algorithm: StageAlgorithm[Any] | None = None, prompts: int = 3, lr: float = 1e-2, **options: Any) -> Setup:
    bundle = ToyBundle()
    stage = DiffusionStage(bundle.denoiser(), bundle.facts)
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=lr))
    stack = TrainStack(backend, algorithm or DiffusionGRPO(), stage, **options)
    return Setup(stack, backend, toy_track(stage, prompts=prompts))


def gradients_of_training(setup: Setup, track: RolloutTrack | None = None) -> list[list[Tensor]]:
    """The gradient of every update, caught on its way into `step`; the weights do move."""
    caught: list[list[Tensor]] = []
    step = setup.backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        caught.append([p.grad.clone() for p in setup.backend.trainable.values() if p.grad is not None])
        return step(max_grad_norm, loss)

    setup.backend.step = catching  # type: ignore[method-assign]
    setup.stack.train_track(setup.track if track is None else track)
    return caught


def assert_same(have: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(have, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))


def varied_weights(track: RolloutTrack) -> RolloutTrack:
    weight = torch.ones(len(track))
    weight[[1, 6]] = 0.0
    return track.replace(weight=weight)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 5, 12, 99])
@pytest.mark.parametrize("steps_per_forward", [1, 2, 3])
def test_gradients_do_not_depend_on_micro_batches_or_parts(micro_batch_size: int, steps_per_forward: int) -> None:
    # One update: Adam's first, sign-like step would blow up the round-off for a second.
    whole = make(micro_batch_size=12)
    want = gradients_of_training(whole, varied_weights(whole.track))[0]
    cut = make(DiffusionGRPO(steps_per_forward=steps_per_forward), micro_batch_size=micro_batch_size)
    assert_same(gradients_of_training(cut, varied_weights(cut.track))[0], want)


def test_the_gradient_is_the_mean_over_counted_rows_and_steps() -> None:
    setup = make(micro_batch_size=5)
    track = varied_weights(setup.track)
    stage, module = setup.stack.stage, setup.backend.module
    kept = track.select([i for i in range(len(track)) if track.weight[i] > 0])
    logp = stage.replay(kept.conditions, kept.segment, (0, 1, 3)).logp
    loss = -(kept.advantages[:, None] * (logp - logp.detach()).exp()).mean()
    want = torch.autograd.grad(loss, list(module.parameters()))
    assert_same(gradients_of_training(setup, track)[0], list(want))


def test_update_u_trains_rows_u_b_over_u_and_no_other() -> None:
    setup = make(num_updates_per_batch=3, micro_batch_size=2, lr=1e-12)
    gradients = gradients_of_training(setup)
    for u, have in enumerate(gradients):
        alone = make()
        rows = alone.track.slice(4 * u, 4 * u + 4)
        assert_same(have, gradients_of_training(alone, rows)[0])


def test_rows_of_weight_zero_change_no_gradient() -> None:
    plain = make()
    want = gradients_of_training(plain)[0]
    filled = make()
    copies = filled.track.select([0, 3, 5]).replace(weight=torch.zeros(3), advantages=torch.full((3,), torch.nan))
    assert_same(gradients_of_training(filled, RolloutTrack.concat([filled.track, copies]))[0], want)


def test_the_second_update_is_anchored_before_the_first_moves_the_weights() -> None:
    setup = make(num_updates_per_batch=2, micro_batch_size=3)
    first, second = (values(update) for update in setup.stack.train_track(setup.track).updates)
    assert (first["train/ratio_mean"], first["train/ratio_std"]) == (1.0, 0.0)
    assert second["train/ratio_std"] > 1e-5
    assert first["rollout/parity_absdiff_max"] == 0.0  # all rows, since the anchor pass sees those of later updates


def test_a_second_update_with_a_vanishing_step_has_ratio_one() -> None:
    setup = make(num_updates_per_batch=2, micro_batch_size=3, lr=1e-30)
    second = values(setup.stack.train_track(setup.track).updates[1])
    assert (second["train/ratio_mean"], second["train/ratio_std"]) == (1.0, 0.0)


def test_fresh_adapters_are_the_reference_exactly_until_they_are_moved() -> None:
    bundle = ToyBundle()
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=LoraConfig(rank=2))
    algorithm = DiffusionGRPO(kl_coef=1.0, velocity_coef=1.0)
    stack = TrainStack(backend, algorithm, DiffusionStage(bundle.denoiser(), bundle.facts), num_updates_per_batch=2)
    first, second = (values(update) for update in stack.train_track(toy_track(toy_stage(), prompts=3)).updates)
    for name in ("train/kl", "train/velocity_mse", "rollout/parity_absdiff_max"):
        assert first[name] == 0.0
    assert second["train/kl"] > 0.0 and second["train/velocity_mse"] > 0.0


def test_parity_covers_the_rows_of_later_updates() -> None:
    setup = make(num_updates_per_batch=2)
    logp = setup.track.segment.logp.clone()
    logp[-1, 0] += 0.5
    track = setup.track.replace(segment=setup.track.segment.replace(logp=logp))
    result = values(setup.stack.train_track(track).updates[0])
    assert result["rollout/parity_absdiff_max"] == pytest.approx(0.5, rel=1e-5)


@dataclass(frozen=True, kw_only=True)
class ReferenceGap(StageAlgorithm[DiffusionStage]):
    """sum (logp - ref_logp)^2: zero with zero gradient while the weights are the reference's."""

    def anchors(self) -> dict[str, Anchor]:
        return {"ref_logp": Anchor("reference", "logp")}

    def parts(self, segment: LatentSegment) -> list[Part]:
        return [(step,) for step in segment.sde_indices]

    def measure(self, stage: DiffusionStage, rows: RolloutTrack, part: Part) -> PolicyOutputs:
        return {"logp": stage.replay(rows.conditions, rows.segment, part).logp.detach()}

    def loss(self, stage: DiffusionStage, rows: RolloutTrack, part: Part, now: TrainingProgress = START) -> LossResult:
        logp = stage.replay(rows.conditions, rows.segment, part).logp
        reference = self.anchor(rows, "ref_logp", part)
        assert reference is not None
        gap = rows.weight[:, None] * (logp - reference).square()
        return LossResult(gap.sum(), {}, {"logp": logp.detach()})


def test_reference_anchors_are_those_of_the_initial_weights_for_all_rows_of_every_update() -> None:
    setup = make(ReferenceGap(), num_updates_per_batch=2, micro_batch_size=3)
    losses = [values(update)["train/loss"] for update in setup.stack.train_track(setup.track).updates]
    assert losses == [0.0, 0.0]
    with torch.no_grad():
        next(iter(setup.backend.trainable.values())).add_(0.1)
    live = setup.stack.stage.replay(setup.track.conditions, setup.track.segment, (0, 1, 3)).logp.detach()
    expected = (live - setup.track.segment.logp).square()[:6].mean()
    result = [values(update)["train/loss"] for update in setup.stack.train_track(setup.track).updates]
    assert result[0] == pytest.approx(float(expected), rel=1e-4)


def test_metrics_of_each_update_carry_the_documented_names() -> None:
    result = values(make().stack.train_track(make().track).updates[0])
    assert {
        "train/loss",
        "train/ratio_mean",
        "train/ratio_std",
        "train/clip_fraction",
        "train/approx_kl",
        "train/grad_norm",
        "train/lr",
        "train/skipped_updates",
        "rollout/parity_absdiff_max",
    } <= result.keys()


def poisoned(track: RolloutTrack) -> RolloutTrack:
    advantages = track.advantages.clone()
    advantages[0] = torch.nan
    return track.replace(advantages=advantages)


def test_a_loss_that_is_not_finite_skips_that_update_only() -> None:
    setup = make(num_updates_per_batch=2)
    before = setup.backend.gather()
    first, second = (values(u) for u in setup.stack.train_track(poisoned(setup.track)).updates)
    assert (first["train/skipped_updates"], second["train/skipped_updates"]) == (1.0, 0.0)
    assert setup.backend.updates == 1 and "train/loss" not in first
    assert any(not torch.equal(before[name], now) for name, now in setup.backend.gather().items())


def test_too_many_updates_in_a_row_that_are_not_finite_stop_the_run() -> None:
    setup = make(max_nonfinite_updates=2)
    before = setup.backend.gather()
    setup.stack.train_track(poisoned(setup.track))
    with pytest.raises(DivergenceError, match=r"2 updates in a row.*first in input_layer\.weight") as raised:
        setup.stack.train_track(poisoned(setup.track))
    assert raised.value.code == 9001
    assert all(torch.equal(before[name], now) for name, now in setup.backend.gather().items())


def test_an_update_in_which_no_row_counts_changes_nothing() -> None:
    setup = make(num_updates_per_batch=2)
    weight = torch.ones(12)
    weight[:6] = 0.0
    result = setup.stack.train_track(setup.track.replace(weight=weight))
    assert [values(u)["train/skipped_updates"] for u in result.updates] == [1.0, 0.0]
    assert setup.backend.updates == 1


def test_updates_that_do_not_divide_the_rows_are_refused_with_the_legal_numbers() -> None:
    setup = make(num_updates_per_batch=5)
    with pytest.raises(ConfigError, match=r"=5 does not divide the 12 rows.*1, 2, 3, 4, 6, 12") as raised:
        setup.stack.train_track(setup.track)
    assert raised.value.code == 2010


def test_a_rollout_without_stochastic_steps_is_refused() -> None:
    setup = make()
    segment = setup.track.segment.replace(sde_indices=(), logp=torch.zeros(12, 0))
    with pytest.raises(ConfigError, match="no stochastic step"):
        setup.stack.train_track(setup.track.replace(segment=segment))


@dataclass(frozen=True, kw_only=True)
class ReadsOld(ReferenceGap):
    def anchors(self) -> dict[str, Anchor]:
        return {"ref_logp": Anchor("old", "logp")}


@dataclass(frozen=True, kw_only=True)
class OneUpdate(DiffusionGRPO):
    supports_multi_update = False


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (ReadsOld(), {}, "ema_lora_cfg"),
        (OneUpdate(), {"num_updates_per_batch": 2}, "one update per rollout"),
        (None, {"micro_batch_size": 0}, r"stack\.micro_batch_size"),
        (None, {"max_grad_norm": 0.0}, r"stack\.max_grad_norm"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_stack_is_built(
    algorithm: StageAlgorithm[Any] | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(algorithm, **options)


def test_results_of_ranks_merge_by_update_with_their_weights() -> None:
    from unirl.types.results import Metric

    def result(*losses: tuple[float, float]) -> TrainStepResult:
        updates: list[Metrics] = [{"train/ratio_mean": Metric.mean(value, weight)} for value, weight in losses]
        return TrainStepResult(tuple(updates))

    merged = merge_ranks([result((1.0, 1.0), (5.0, 2.0)), result((4.0, 2.0), (5.0, 2.0))])
    assert [values(u)["train/ratio_mean"] for u in merged.updates] == [3.0, 5.0]


def test_one_graph_is_alive_at_a_time() -> None:
    """Tensors saved for backward at any moment: the same for one and for three trained steps."""

    def peak(steps: int) -> int:
        stage = toy_stage()
        track = toy_track(stage)
        segment = track.segment.replace(
            sde_indices=track.segment.sde_indices[:steps], logp=track.segment.logp[:, :steps]
        )
        alive = most = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal alive, most
            alive += tensor.numel()
            most = max(most, alive)
            return tensor

        def backward(loss: Tensor, last: bool) -> None:
            nonlocal alive
            loss.backward()
            alive = 0

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            DiffusionGRPO().compute_loss_and_backward(stage, track.replace(segment=segment), backward)
        return most

    assert peak(3) == peak(1) > 0

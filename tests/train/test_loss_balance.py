"""The sizes of losses: their closed form, the objective that they minimise, and updates that do not depend on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.ranks import run_ranks
from tests.train.test_unified_model_stack import WEIGHTS, Setup, assert_same, weighted_sum
from unirl.algorithms.base import LOSS_RMS
from unirl.config.errors import ResumeError, UniRLError
from unirl.distributed import current
from unirl.train.loss_balance import LossScale, TrackGradient, UncertaintyBalance
from unirl.train.unified_model_stack import SHARED
from unirl.types.results import Metric, values

SIZES = {"text": 3.0, "image": 0.5}


def balanced(**options: Any) -> Setup:
    return Setup(loss_weights=WEIGHTS, balance="uncertainty", **options)


def scale(setup: Setup, **factors: float) -> Setup:
    """`setup` with the advantages of each named track times its factor."""
    for name, factor in factors.items():
        track = setup.tracks[name]
        setup.tracks[name] = track.replace(advantages=track.advantages * factor)
    return setup


def constant(setup: Setup, **advantages: float) -> Setup:
    """`setup` with one advantage for all rows of a track. At ratio 1, each element of its loss is minus that."""
    for name, value in advantages.items():
        track = setup.tracks[name]
        setup.tracks[name] = track.replace(advantages=torch.full_like(track.advantages, value))
    return setup


def used(setup: Setup) -> dict[str, float]:
    """The factors of a step."""
    results = setup.train()
    return {name: values(results[name].metrics)["train/loss_weight"] for name in WEIGHTS}


def minimiser(objective: Any) -> float:
    """The s > 0 that minimises `objective(s)`, found numerically over log s."""
    log_s = torch.zeros((), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([log_s], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = objective(log_s.exp())
        value.backward()
        return value

    search.step(closure)
    return float(log_s.detach().exp())


# The size


def test_the_size_minimises_the_likelihood_of_elements_of_either_sign() -> None:
    """Eq. 5 of arXiv:1705.07115 with the loss element as the residual."""
    elements = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3.0 - 0.5
    best = minimiser(lambda s: (elements.square() / (2 * s.square()) + s.log()).mean())
    size = LossScale()
    size.observe(float(elements.square().mean()), decay=0.9)
    assert size.value(0.9) == pytest.approx(best, rel=1e-4)


def test_constant_positive_losses_get_weights_in_the_ratio_of_kendall() -> None:
    losses = {"text": 3.0, "image": 0.2}
    best = {name: minimiser(lambda s, loss=loss: loss / (2 * s.square()) + s.log()) for name, loss in losses.items()}
    theirs = {name: 1.0 / (2.0 * s**2) for name, s in best.items()}
    rule = UncertaintyBalance(losses, decay=0.9)
    one = torch.ones(1)
    ours = rule.factors({n: TrackGradient(1.0, 1.0, {LOSS_RMS: Metric.rms(v * one, one)}) for n, v in losses.items()})
    assert ours["text"] / ours["image"] == pytest.approx(theirs["text"] / theirs["image"], rel=1e-3)


def test_the_average_is_a_weighted_mean_in_which_older_updates_count_less() -> None:
    size, squares, decay = LossScale(), [4.0, 1.0, 0.0, 9.0], 0.8
    for n, square in enumerate(squares, start=1):
        size.observe(square, decay)
        ages = [decay ** (n - j) for j in range(1, n + 1)]
        mean = sum(age * each for age, each in zip(ages, squares, strict=False)) / sum(ages)
        assert size.value(decay) == pytest.approx(math.sqrt(mean), rel=1e-12)


# Updates


def test_a_joint_update_divides_each_gradient_by_the_size_of_its_loss() -> None:
    setup = constant(balanced(), **SIZES)
    results = setup.train()
    factors = {name: WEIGHTS[name] / SIZES[name] for name in WEIGHTS}
    have = {name: values(results[name].metrics) for name in (*WEIGHTS, SHARED)}
    assert {name: have[name]["train/loss_weight"] for name in WEIGHTS} == pytest.approx(factors, rel=1e-6)
    assert_same(setup.caught[0], weighted_sum({name: setup.alone(name) for name in WEIGHTS}, factors))
    # Every element of a balanced loss is minus its loss weight, and so is their mean.
    assert have[SHARED]["train/loss"] == pytest.approx(-sum(WEIGHTS.values()), rel=1e-6)


def test_later_updates_divide_by_the_running_size() -> None:
    setup = constant(balanced(balance_decay=0.5), text=2.0)
    assert used(setup)["text"] == pytest.approx(WEIGHTS["text"] / 2.0)
    # By hand: the mean squares 4 and 1 with the weights 1/3 and 2/3.
    assert used(constant(setup, text=1.0))["text"] == pytest.approx(WEIGHTS["text"] / math.sqrt(2.0))


def test_without_memory_only_the_last_update_counts() -> None:
    setup = constant(balanced(balance_decay=0.0), text=2.0)
    setup.train()
    assert used(constant(setup, text=1.0))["text"] == pytest.approx(WEIGHTS["text"])


@pytest.mark.parametrize("num_updates", [1, 2])
def test_updates_do_not_depend_on_the_unit_of_a_loss(num_updates: int) -> None:
    """To the bit, since a power of two rounds nothing."""
    plain, larger = balanced(num_updates_per_batch=num_updates), balanced(num_updates_per_batch=num_updates)
    scale(larger, image=1024.0)
    for _ in range(3):
        plain.train(), larger.train()
    assert len(plain.caught) == 3 * num_updates
    for have, want in zip(larger.caught, plain.caught, strict=True):
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


def test_a_loss_whose_mean_is_zero_is_not_divided_by_it() -> None:
    """The loss of GRPO is minus the mean advantage, which is 0 in every group; its elements are not."""
    setup = balanced()
    results = setup.train()
    image = values(results["image"].metrics)
    size = float(setup.tracks["image"].advantages.double().square().mean().sqrt())
    assert abs(image["train/loss"]) < 1e-6 < size
    assert image["train/loss_weight"] == pytest.approx(WEIGHTS["image"] / size, rel=1e-5)
    assert image[LOSS_RMS] == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 3])
def test_the_size_does_not_depend_on_micro_batches(micro: int) -> None:
    assert used(balanced(micro=micro)) == pytest.approx(used(balanced()), rel=1e-6)


def test_a_loss_without_any_advantage_adds_nothing() -> None:
    setup = scale(balanced(), image=0.0)
    factors = used(setup)
    assert factors["image"] == 0.0
    assert_same(setup.caught[0], weighted_sum({name: setup.alone(name) for name in WEIGHTS}, factors))


def test_a_track_without_counted_rows_keeps_its_size() -> None:
    setup = constant(balanced(), text=2.0)
    setup.train()
    dropped = setup.tracks["image"].replace(weight=torch.zeros(len(setup.tracks["image"])))
    before = setup.stack.state_dict()
    assert "train/loss_weight" not in setup.train(image=dropped)["image"].metrics
    after = setup.stack.state_dict()
    assert after["image"] == before["image"] and after["text"]["updates"] == 2


def test_an_update_that_is_not_finite_is_skipped_and_keeps_the_size() -> None:
    setup = balanced()
    setup.train()
    before = setup.stack.state_dict()
    broken = setup.tracks["text"].replace(advantages=torch.full_like(setup.tracks["text"].advantages, math.nan))
    assert values(setup.train(text=broken)[SHARED].metrics)["train/skipped_updates"] == 1
    assert setup.stack.state_dict()["text"] == before["text"]


# Ranks and checkpoints


def factors_of_rank(rows: list[list[float]]) -> list[Any]:
    """Two updates on this rank's rows: the factors of both, and the state."""
    rank, rule = current(), UncertaintyBalance(("text",), decay=0.9)
    results: list[Any] = []
    for update in rows:
        own = torch.tensor(update[rank.dp_rank :: rank.dp_size])
        metrics = {LOSS_RMS: Metric.rms(own, torch.ones_like(own))}
        results.append(rule.factors({"text": TrackGradient(0.5, 1.0, metrics)})["text"])
    return [*results, rule.state_dict()]


def test_ranks_with_different_rows_divide_by_the_same_size() -> None:
    rows = [[1.0, -20.0, 3.0, 0.5], [2.0, 0.0, -7.0, 100.0]]
    first, second = run_ranks(2, factors_of_rank, rows)
    assert first == second
    *alone, _ = factors_of_rank(rows)
    assert first[:2] == pytest.approx(alone, rel=1e-12)
    assert alone[0] == pytest.approx(0.5 / math.sqrt((1 + 400 + 9 + 0.25) / 4))


def test_a_restored_stack_goes_on_as_one_that_was_not_stopped() -> None:
    whole, restored = balanced(), balanced()
    whole.train()
    restored.stack.load_state_dict(whole.stack.state_dict())
    scale(whole, image=3.0), scale(restored, image=3.0)
    assert used(restored) == used(whole)
    assert used(scale(balanced(), image=3.0)) != used(restored)  # the first update does count


def test_a_checkpoint_of_other_tracks_is_refused() -> None:
    state = balanced().stack.state_dict()
    with pytest.raises(ResumeError, match="sizes of the losses of text, this recipe trains text, image"):
        balanced().stack.load_state_dict({"text": state["text"]})
    assert Setup(balance="gradient_norm").stack.state_dict() == Setup().stack.state_dict() == {}


# Refusals


def test_a_loss_that_does_not_report_its_size_is_refused() -> None:
    rule = UncertaintyBalance(("text",), decay=0.9)
    with pytest.raises(UniRLError, match=r"reads the metric train/loss_rms, which the loss of text does not report"):
        rule.factors({"text": TrackGradient(1.0, 1.0, {})})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "uncertainty", "schedule": "alternating"}, "stack.balance=uncertainty balances the gradients"),
        ({"balance": "gradient_norm", "balance_decay": 0.5}, "balance_decay=0.5 has no effect: stack.balance=gradient"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UniRLError, match=message):
        Setup(**options)

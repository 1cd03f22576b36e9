"""A loss that breaks its contract is refused by its class and line, what it returned, and what it must return."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.tokens import token_stage, token_track
from unirl.algorithms.base import LossResult
from unirl.algorithms.shared.contract import check_declarations, count_of, parts_of
from unirl.algorithms.shared.denoising import DenoisingLoss
from unirl.algorithms.shared.forward_process import PenalizedLoss
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss
from unirl.config import plugins
from unirl.config.errors import PluginError
from unirl.testing.algorithm import prepared_track
from unirl.testing.toy import toy_stage, toy_track
from unirl.types.results import Metric

Wrong = Callable[[Any], Any]
"""What a method returns in place of the right value."""


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class OwnLoss(DenoisingLoss):
    returns: Wrong = same
    loss_returns: Wrong = same
    measure_returns: Wrong = same
    old: Any = ("logp",)

    def old_quantities(self):
        return self.old

    def policy_loss(self, new, rows, part, advantages, now):
        log_ratio = new.logp - self.old_logp(new, rows, part)
        return self.returns((-advantages * log_ratio.exp(), {}))

    def loss(self, stage, rows, part, now):
        return self.loss_returns(super().loss(stage, rows, part, now))

    def measure(self, stage, rows, part):
        return self.measure_returns(super().measure(stage, rows, part))


@dataclass(frozen=True, kw_only=True)
class OwnPrediction(PenalizedLoss):
    returns: Wrong = same
    velocity_coef: float = 0.0

    def policy_loss(self, noised, v, rows, part):
        return self.returns(((v.double() - noised.target).square().flatten(2).mean(2), {}))


@dataclass(frozen=True, kw_only=True)
class OwnSurrogate(TokenLoss):
    returns: Wrong = same

    def surrogate(self, tokens, now):
        no_token = torch.zeros_like(tokens.logp, dtype=torch.bool)
        return self.returns(Surrogate(-tokens.advantages * tokens.log_ratio, tokens.log_ratio, no_token, no_token))


def train(loss: Any) -> dict[str, Metric]:
    """The metrics of one update with two denoising steps in a part, after which the toy's weights have gradients."""
    if isinstance(loss, TokenLoss):
        stage: Any = token_stage()
        track: Any = token_track(stage)
    else:
        stage = toy_stage()
        track = toy_track(stage)
    return loss.compute_loss_and_backward(stage, track, lambda total, last: total.backward())


def refused(loss: Any, method: str) -> str:
    """The error of one update, which must name the class and the line of `method`."""
    with pytest.raises(PluginError) as caught:
        train(loss)
    kind = type(loss)
    line = vars(kind)[method].__code__.co_firstlineno
    assert f"your class {__name__}.{kind.__qualname__}, {__file__}:{line}: {method} returned " in str(caught.value)
    assert "\n  Contract of " in str(caught.value)
    return str(caught.value)


MUST = r"It must return \(losses, metrics\): a tensor of shape \[8, 2\] and a dict"
METRIC = r"A metric is a unirl\.types\.results\.Metric of one detached number"


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda pair: (pair[0].mean(), {}), rf"losses as a tensor of shape \[\]\. {MUST}"),
        (lambda pair: (pair[0].mean(1), {}), rf"losses as a tensor of shape \[8\]\. {MUST}"),
        (lambda pair: (pair[0].mean(1, keepdim=True), {}), rf"losses as a tensor of shape \[8, 1\]\. {MUST}"),
        (lambda pair: (pair[0][..., None], {}), rf"losses as a tensor of shape \[8, 2, 1\]\. {MUST}"),
        (lambda pair: (0.0, {}), rf"losses as float '0\.0'\. {MUST}"),
        (lambda pair: pair[0], rf"returned a tensor of shape \[8, 2\]\. {MUST}"),
        (lambda pair: (*pair, 1), rf"returned a tuple of 3\. {MUST}"),
        (lambda pair: None, rf"returned None\. {MUST}"),
        (lambda pair: (pair[0].detach(), {}), r"shape \[8, 2\] without a gradient\. Compute it from the outputs of"),
        (lambda pair: (pair[0], None), rf"metrics as None\. It must be a dict, {{}} without metrics\. {METRIC}"),
        (lambda pair: (pair[0], {"custom/a": pair[0].mean()}), rf"'custom/a' as a tensor of shape \[\]\. {METRIC}"),
        (lambda pair: (pair[0], {"custom/a": 1.0}), rf"'custom/a' as float '1\.0'\. {METRIC}"),
        (lambda pair: (pair[0], {"custom/a": Metric.mean(pair[0].detach())}), r"a total that is a tensor"),
        (lambda pair: (pair[0], {"custom/a": Metric.mean(pair[0].mean())}), r"a total that is not detached"),
        (lambda pair: (pair[0], {"custom/a": Metric.mean(1.0, -1.0)}), r"a weight that is -1\.0\. The weight"),
        (lambda pair: (pair[0], {"mine": Metric.mean(1.0)}), r"the metric 'mine'\. Name it custom/<name>"),
        (lambda pair: (pair[0], {"train/kll": Metric.mean(1.0)}), r"Name it custom/<name>\. Did you mean 'train/kl"),
        (lambda pair: (pair[0], {1: Metric.mean(1.0)}), r"a metric named 1\. A name is text"),
    ],
)
def test_a_wrong_return_of_policy_loss_is_named(returns, says):
    assert re.search(says, refused(OwnLoss(returns=returns, steps_per_forward=2), "policy_loss"))


@pytest.mark.parametrize("loss", [OwnLoss(), OwnPrediction(), OwnSurrogate()], ids=["steps", "velocities", "tokens"])
def test_a_right_return_passes(loss):
    assert "train/policy_loss" in train(loss)


def test_a_metric_of_one_number_passes():
    loss = OwnLoss(returns=lambda pair: (pair[0], {"custom/a": Metric.mean(pair[0].detach().mean(), pair[0].numel())}))
    assert "custom/a" in train(loss)


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda pair: (pair[0].mean(), {}), r"losses as a tensor of shape \[\]\. It must .*\[8, 1\]"),
        (lambda pair: (pair[0], {"custom/a": 1}), METRIC),
    ],
)
def test_a_wrong_return_on_clean_samples_is_named(returns, says):
    assert re.search(says, refused(OwnPrediction(returns=returns), "policy_loss"))


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda s: (s.losses, {}), r"a tuple of 2\. It must return a unirl\.algorithms\.shared\.tokens\.Surrogate"),
        (lambda s: replace(s, losses=s.losses.mean()), r"losses as a tensor of shape \[\]\. It must be .*\[\d+\]"),
        (lambda s: replace(s, above=None), r"above as None"),
        (lambda s: replace(s, log_ratio=s.log_ratio[1:]), r"log_ratio as a tensor of shape"),
        (lambda s: replace(s, terms={"custom/t": s.losses.mean()}), r"custom/t as a tensor of shape \[\]"),
        (lambda s: replace(s, metrics={"custom/a": 1}), METRIC),
    ],
)
def test_a_wrong_return_of_surrogate_is_named(returns, says):
    assert re.search(says, refused(OwnSurrogate(returns=returns), "surrogate"))


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda r: r.loss, r"a tensor of shape \[\]\. It must return a unirl\.algorithms\.base\.LossResult"),
        (lambda r: replace(r, loss=r.loss.expand(2)), r"a loss that is .*\[2\]\. .*the sum over all"),
        (lambda r: replace(r, loss=r.loss.detach()), r"a loss without a gradient"),
        (lambda r: LossResult(r.loss, {"custom/a": r.loss}, r.outputs), METRIC),
        (lambda r: LossResult(r.loss, {}, {}), r"no output 'logp', which an anchor reads"),
        (lambda r: LossResult(r.loss, {}, {"logp": r.loss}), r"'logp' as .* that is not detached"),
    ],
)
def test_a_wrong_return_of_loss_is_named(returns, says):
    assert re.search(says, refused(OwnLoss(loss_returns=returns), "loss"))


@pytest.mark.parametrize(("returns", "says"), [(lambda o: None, "outputs as None"), (lambda o: {}, "no output 'logp'")])
def test_a_wrong_return_of_measure_is_named(returns, says):
    stage = toy_stage()
    with pytest.raises(PluginError, match=rf"OwnLoss, \S+:\d+: measure returned {says}"):
        prepared_track(OwnLoss(measure_returns=returns), stage, toy_track(stage))


@pytest.mark.parametrize("old", ["logp", None, ("nope",), ("value",)])
def test_unknown_outputs_of_the_policy_that_sampled_are_named(old):
    with pytest.raises(PluginError, match=r"old_quantities returned .* It must return a tuple of logp, mean, velocity"):
        check_declarations(OwnLoss(old=old))


class OwnAnchors(OwnLoss):
    def anchors(self):
        return {"old_logp": "live"}


class OwnNeeds(OwnLoss):
    @property
    def needs(self):
        return {"density": True}


@pytest.mark.parametrize(
    ("loss", "says"),
    [(OwnAnchors(), "anchors returned 'old_logp' as str"), (OwnNeeds(), "needs returned dict")],
)
def test_wrong_declarations_are_named(loss, says):
    with pytest.raises(PluginError, match=rf"your class \S+, \S+:\d+: {says}"):
        check_declarations(loss)


class OwnParts(OwnLoss):
    def parts(self, segment):
        return [0, 1]


class OwnCount(OwnLoss):
    def count(self, rows):
        return float("nan")


class OwnPlaces(OwnLoss):
    def parts(self, segment):
        return [(99,)]


class OwnAdvantages(OwnLoss):
    def element_advantages(self, rows, part):
        return rows.advantages


def test_wrong_parts_counts_and_advantages_are_named():
    track = toy_track(toy_stage())
    with pytest.raises(PluginError, match=r"parts returned list '\[0, 1\]'\. It must return a list of tuples"):
        parts_of(OwnParts(), track.segment)
    with pytest.raises(PluginError, match=r"count returned nan\. It must return a finite number >= 0"):
        count_of(OwnCount(), track)
    with pytest.raises(PluginError, match=r"element_advantages returned a tensor of shape \[8\]\. .*\[8, 1\]"):
        train(OwnAdvantages())


def test_an_error_that_a_loss_of_the_user_causes_in_our_code_names_its_class():
    plugins.forget()  # an error that passes through a known plugin is explained where the command ends
    with pytest.raises(PluginError, match=r"your class \S+OwnPlaces, \S+: computing its loss: ValueError: .* 99 "):
        train(OwnPlaces())

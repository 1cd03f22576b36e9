"""The recipe keys of losses over tokens: what they refuse, need and anchor; and how a recipe writes them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.algorithms.ragged import assert_same_gradient, ragged, sequences, value
from unirl.algorithms.ar_grpo import ARGRPO, GSPO
from unirl.algorithms.ar_trust_regions import CISPO, CPPO, DPPO, DRPO, GMPO, SAPO
from unirl.algorithms.shared.kl import AdaptiveKL
from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.algorithms.shared.tokens import TokenLoss, drift_metrics
from unirl.config.build import build, check_node
from unirl.config.errors import ConfigError
from unirl.tracking.metrics import check_names
from unirl.types.protocols import Anchor

LOSSES: list[type[TokenLoss]] = [ARGRPO, GSPO, CISPO, DRPO, DPPO, CPPO, SAPO, GMPO]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"clip_range": 0.0}, "clip_range"),
        ({"clip_range": 1.0}, "clip_range"),
        ({"clip_range_high": 0.0}, "clip_range_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "horizon"),
        ({"horizon": 8}, "horizon"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 0}, "horizon"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"entropy_coef": float("nan")}, "entropy_coef"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "kl_estimator must be k1"),
        ({"kl_adaptive": AdaptiveKL(target=0.1)}, "kl_adaptive"),
        ({"mismatch": TokenTIS(), "old_logp_source": "rollout"}, "mismatch"),
    ],
)
def test_settings_without_effect_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as raised:
        ARGRPO(**options)
    assert raised.value.code == 2004


@pytest.mark.parametrize("loss", LOSSES)
def test_needs_and_anchors_follow_from_the_keys(loss: type[TokenLoss]) -> None:
    plain = loss()
    assert plain.anchors() == {"old_logp": Anchor("live", "logp")}
    assert not plain.needs.behaviour_logp and plain.needs.multi_update and plain.needs.snapshots == ()
    rollout = loss(old_logp_source="rollout", kl_coef=0.1)
    assert rollout.anchors() == {"ref_logp": Anchor("reference", "logp")}
    assert rollout.needs.behaviour_logp and rollout.needs.snapshots == ("reference",)
    assert loss(mismatch=TokenTIS()).needs.behaviour_logp


def test_sequence_methods_average_sequences_by_default() -> None:
    rules = {loss.__name__: loss().loss_agg_mode for loss in LOSSES}
    by_sequence = {name for name, rule in rules.items() if rule == "seq-mean-token-mean"}
    assert by_sequence == {"GSPO", "SAPO", "GMPO"}
    assert set(rules.values()) == {"token-mean", "seq-mean-token-mean"}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_metric_is_in_the_table(loss: type[TokenLoss]) -> None:
    stage, track = ragged(0)
    algorithm = loss(kl_coef=0.1, entropy_coef=0.1, mismatch=TokenTIS())
    check_names(algorithm.loss(stage, track, (0,)).metrics)


def test_the_trust_width_is_that_of_a_token_ratio() -> None:
    assert ARGRPO(clip_range=0.2, clip_range_high=0.1).trust_width() == 0.1
    assert GSPO().trust_width() is None and DPPO().trust_width() is None


def test_an_adaptive_coefficient_has_a_controller() -> None:
    assert ARGRPO(kl_coef=0.1).kl_controller() is None
    controller = ARGRPO(kl_coef=0.1, kl_adaptive=AdaptiveKL(target=6.0)).kl_controller()
    assert controller is not None and controller.scale == 1.0


def test_parity_is_the_largest_gap_of_counted_tokens() -> None:
    stage, track = ragged(0)
    own = stage.logp.detach()
    logp = own.clone()
    counted = track.segment.loss_mask.nonzero().flatten()
    logp[counted[0]] += 0.25
    logp[~track.segment.loss_mask] += 9.0
    rows = track.replace(segment=track.segment.replace(logp=logp))
    result = ARGRPO().parity(rows, (0,), {"logp": own})
    assert result["rollout/parity_absdiff_max"].value == pytest.approx(0.25)
    empty = rows.select([2])
    assert ARGRPO().parity(empty, (0,), {"logp": torch.zeros(0)})["rollout/parity_absdiff_max"].value == 0.0


def test_drift_is_the_mean_gap_and_the_divergence_of_the_engine_from_the_replay() -> None:
    stage, track = ragged(0)
    own = stage.logp.detach()
    metrics = ARGRPO().parity(track, (0,), {"logp": own})
    gaps = [
        (row.engine - row.new.detach(), row.weight)
        for row in sequences(stage, track)
        if row.weight > 0 and len(row.new)
    ]
    tokens = sum(weight * len(gap) for gap, weight in gaps)
    mean = sum(weight * float(gap.abs().sum()) for gap, weight in gaps) / tokens
    kl = sum(weight * float((gap.neg().exp() - 1 + gap).sum()) for gap, weight in gaps) / tokens
    assert metrics["rollout/parity_absdiff_mean"].value == pytest.approx(mean)
    assert metrics["rollout/parity_kl"].value == pytest.approx(kl) and kl > 0


def test_drift_estimates_the_divergence_between_engine_and_trainer() -> None:
    """On all tokens of two categoricals, each as often as the engine draws it."""
    engine, trainer = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.3, 0.2], [0.4, 0.35, 0.25]))
    metrics = drift_metrics(engine - trainer, engine.exp())
    assert metrics["rollout/parity_kl"].value == pytest.approx(float((engine.exp() * (engine - trainer)).sum()))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_mask_truncated_counts_no_token_of_a_truncated_response(mode: Any) -> None:
    stage, track = ragged(0)
    finished = torch.arange(len(track)) % 2 == 0
    cut = track.replace(segment=track.segment.replace(finished=finished))
    blank = track.segment.loss_mask & finished.repeat_interleave(track.segment.lengths)
    want = track.replace(segment=track.segment.replace(loss_mask=blank))
    have = value(ARGRPO(mask_truncated=True, loss_agg_mode=mode), stage, cut)
    assert_same_gradient(stage, have, value(ARGRPO(loss_agg_mode=mode), stage, want))
    assert not torch.equal(have, value(ARGRPO(loss_agg_mode=mode), stage, cut))


def written(options: Mapping[str, Any]) -> Any:
    """As a recipe's `algorithm` block is read."""
    return build(check_node(dict(options), path="algorithm"))


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"_target_": "unirl.algorithms.ar_grpo.ARGRPO", "clip_range_high": 0.28}, ARGRPO(clip_range_high=0.28)),
        ({"_target_": "unirl.algorithms.ar_grpo.GSPO"}, GSPO(clip_range=3e-4, clip_range_high=4e-4)),
        (
            {
                "_target_": "unirl.algorithms.ar_trust_regions.DRPO",
                "loss_agg_mode": "seq-mean-token-sum-norm",
                "horizon": 8192,
                "mismatch": {"_target_": "unirl.algorithms.shared.mismatch.TokenTIS", "cap": 3},
                "kl_coef": 0.001,
                "kl_adaptive": {"target": 0.02},
            },
            DRPO(
                loss_agg_mode="seq-mean-token-sum-norm",
                horizon=8192,
                mismatch=TokenTIS(cap=3.0),
                kl_coef=0.001,
                kl_adaptive=AdaptiveKL(target=0.02),
            ),
        ),
    ],
    ids=["dapo", "gspo", "drpo"],
)
def test_a_recipe_block_makes_the_loss(options: Mapping[str, Any], made: TokenLoss) -> None:
    assert written(options) == made


def test_a_recipe_is_told_which_key_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator"):
        written({"_target_": "unirl.algorithms.ar_grpo.ARGRPO", "kl_estimator": "k4"})
    with pytest.raises(ConfigError, match=r"algorithm\.mismatch"):
        written(
            {
                "_target_": "unirl.algorithms.ar_grpo.ARGRPO",
                "mismatch": {"_target_": "unirl.algorithms.shared.kl.AdaptiveKL"},
            }
        )
    with pytest.raises(ConfigError, match=r"algorithm\.mismatch\.cap"):
        cap = {"_target_": "unirl.algorithms.shared.mismatch.TokenTIS", "cap": 0.5}
        written({"_target_": "unirl.algorithms.ar_grpo.ARGRPO", "mismatch": cap})

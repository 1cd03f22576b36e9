"""The factors of the gradients of several tracks in one joint update, once all of the gradients are known.

    gradient_norm   f_t = w_t m / |g_t|     m = sum of w_t |g_t| / sum of w_t
    uncertainty     f_t = w_t / s_t         s_t = running root mean square of the loss over its elements

w_t is the loss weight of track t, g_t the gradient of its mean loss. docs/unified_models_balance.md has the derivation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from unirl.algorithms.base import LOSS_RMS
from unirl.config.errors import IncompatibleError, ResumeError
from unirl.distributed import current
from unirl.types.protocols import State
from unirl.types.results import Metrics


@dataclass(frozen=True)
class TrackGradient:
    """A gradient that was set aside."""

    weight: float
    """The loss weight of the track."""
    norm: float
    metrics: Metrics
    """The metrics of the loss on this rank."""


class LossBalance(ABC):
    """A rule for the factors. It is `Stateful`; its state is equal on all ranks."""

    @abstractmethod
    def factors(self, gradients: Mapping[str, TrackGradient]) -> dict[str, float]:
        """The factor of the gradient of each track. It is called once per update; this is a collective."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        return None


class NormBalance(LossBalance):
    """Gives the gradients norms in the ratio of the loss weights. A gradient of norm 0 adds nothing."""

    def factors(self, gradients: Mapping[str, TrackGradient]) -> dict[str, float]:
        weights = sum(each.weight for each in gradients.values())
        mean = sum(each.weight * each.norm for each in gradients.values()) / weights
        return {name: each.weight * mean / each.norm if each.norm else 0.0 for name, each in gradients.items()}


@dataclass
class LossScale:
    """The running root mean square s of the loss over its elements, as an exponential average of n updates.

    s^2 = sum_j d^(n - j) m_j / sum_j d^(n - j),  m_j = mean square of update j, d = decay

    The denominator is the bias correction of Adam (arXiv:1412.6980, section 3), so the first update needs no value
    from before.
    """

    average: float = 0.0
    """(1 - d) sum_j d^(n - j) m_j"""
    updates: int = 0
    """n"""

    def observe(self, mean_square: float, decay: float) -> None:
        """Add an update. The average leaves out an update whose loss is not finite, as the weights do."""
        if math.isfinite(mean_square):
            self.average = decay * self.average + (1.0 - decay) * mean_square
            self.updates += 1

    def value(self, decay: float) -> float:
        """s; 0 before the first update, and as long as every element was 0."""
        return math.sqrt(self.average / (1.0 - decay**self.updates)) if self.updates else 0.0


class UncertaintyBalance(LossBalance):
    """Divides each loss by its size, after Kendall et al. 2018 (arXiv:1705.07115), for losses of any sign.

    A loss whose elements were all 0 so far adds nothing, since its gradient is 0.
    """

    def __init__(self, tracks: Iterable[str], decay: float) -> None:
        self.decay = decay
        self.scales = {name: LossScale() for name in tracks}

    def factors(self, gradients: Mapping[str, TrackGradient]) -> dict[str, float]:
        sizes: dict[str, float] = {}
        for name, each in gradients.items():
            self.scales[name].observe(mean_square(name, each.metrics), self.decay)
            sizes[name] = self.scales[name].value(self.decay)
        return {name: each.weight / sizes[name] if sizes[name] else 0.0 for name, each in gradients.items()}

    def state_dict(self) -> State:
        return {name: asdict(scale) for name, scale in self.scales.items()}

    def load_state_dict(self, state: State) -> None:
        if state.keys() != self.scales.keys():
            raise ResumeError(
                f"the checkpoint holds the sizes of the losses of {', '.join(state)}, this recipe trains "
                f"{', '.join(self.scales)}. Resume with the recipe that wrote it, or start again with resume=none"
            )
        self.scales = {name: LossScale(**values) for name, values in state.items()}


def mean_square(track: str, metrics: Metrics) -> float:
    """The mean of the squared loss elements over all ranks; nan if there is no element. This is a collective."""
    if LOSS_RMS not in metrics:
        raise IncompatibleError(
            f"stack.balance=uncertainty reads the metric {LOSS_RMS}, which the loss of {track} does not report. Let "
            "its LossResult.metrics include it, by Metric.rms, or use balance=fixed or gradient_norm"
        )
    rms, rank = metrics[LOSS_RMS], current()
    squares, weight = (rank.sum_over_dp(float(total)) for total in (rms.squares, rms.weight))
    return squares / weight if weight else math.nan

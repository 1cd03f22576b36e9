"""The gate before the first update: it compares the log-probs of the engine with those of the trainer's replay.

The loss clips at a ratio of 1 +- clip_range, so the gate measures a difference in clip ranges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unirl.config.errors import ParityError
from unirl.config.recipe import ParityConfig
from unirl.train.parity import Parity

CAUSES = (
    "the engine samples from other weights (another checkpoint, an adapter that is not bound), in another dtype "
    "(rollout.dtype, trajectory_dtype), with another schedule, guidance, temperature or tokenizer, records log-probs "
    "of what was left after truncation (top_p, top_k), or it forwards batches of other sizes on kernels whose bits "
    "depend on them"
)


@dataclass(frozen=True)
class ParityGate:
    """Judges the ratios of the first rollout of a process, and the largest gap of every later one."""

    config: ParityConfig
    clip_range: float
    """The smaller half width of the loss's trust region."""

    def judge(self, table: Sequence[Parity]) -> str | None:
        """A warning, or None where both agree. Raises ParityError (9002) at or beyond `parity.stop`."""
        # NaN is the worst gap. It compares as false with every number.
        worst = max(table, key=lambda line: (math.isnan(line.absdiff_max), line.absdiff_max), default=None)
        if worst is None or not self.is_suspicious(worst.absdiff_max):
            return None
        text = (
            f"before the first update the importance ratio should be 1, but at {worst.place} the "
            f"engine's log-probs differ from the trainer's replay by up to {worst.absdiff_max:.3g} nats "
            f"({worst.absdiff_max / self.clip_range:.3g} clip ranges of {self.clip_range:g}; ratio "
            f"{worst.ratio_mean:.6f} +- {worst.ratio_std:.2g}). All: "
            f"{', '.join(f'{line.place} {line.absdiff_max:.2g}' for line in table)}. Probable causes: {CAUSES}"
        )
        if self.config.stop and not worst.absdiff_max < self.config.stop * self.clip_range:
            raise ParityError(f"{text}. Remove the cause, or set parity.stop=0 to train with this difference")
        return text

    def is_suspicious(self, absdiff: float) -> bool:
        """True if a difference of `absdiff` nats deserves a warning."""
        return self.config.warn > 0 and not absdiff < self.config.warn * self.clip_range

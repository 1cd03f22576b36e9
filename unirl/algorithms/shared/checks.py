"""Checks of recipe keys. Each raises InvalidValueError with the key, the rule and a hint. None is not checked."""

from __future__ import annotations

import math

from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.types.sampling import ActionSamplingParams


def check_key(holds: bool, key: str, rule: str, value: object, hint: str = "") -> None:
    """The value of `key` is right if `holds`."""
    if not holds:
        raise InvalidValueError(f"{key} must {rule}, got {value}" + (f"; {hint}" if hint else ""))


def check_no_expert(sampling: ActionSamplingParams) -> None:
    """Raises IncompatibleError (2020) if an expert acts or labels: only imitation learns from it."""
    if sampling.expert_share is not None:
        raise IncompatibleError(
            f"sampling.expert_share={sampling.expert_share}: this loss learns from the actions of the policy itself, "
            "not from an expert. Leave out sampling.expert_share and pipeline.expert, or set "
            "algorithm._target_=unirl.algorithms.imitation.BehaviourCloning"
        )


def check_coefficients(**keys: float) -> None:
    """Keys of a loss that must be finite and >= 0."""
    for name, value in keys.items():
        check_key(0.0 <= value < math.inf, f"algorithm.{name}", "be finite and >= 0", value, "0 turns it off")


def check_positive(hint: str = "1 is usual", **keys: float | None) -> None:
    """Keys of a loss that must be finite and > 0."""
    for name, value in keys.items():
        check_key(value is None or 0.0 < value < math.inf, f"algorithm.{name}", "be finite and > 0", value, hint)


def check_fractions(hint: str, **keys: float | None) -> None:
    """Keys of a loss that must lie in (0, 1)."""
    for name, value in keys.items():
        check_key(value is None or 0.0 < value < 1.0, f"algorithm.{name}", "lie in (0, 1)", value, hint)


def check_above(bound: float, hint: str, owner: str = "algorithm", **keys: float | None) -> None:
    """Keys of `owner` that must be > `bound` and may be infinite."""
    for name, value in keys.items():
        check_key(value is None or value > bound, f"{owner}.{name}", f"be > {bound:g}", value, hint)

"""Checks for your own kernels, models, losses, rewards and engines. Each raises AssertionError with a sentence."""

from unirl.testing.algorithm import check_algorithm
from unirl.testing.engine import check_engine
from unirl.testing.environment import check_environment
from unirl.testing.family import check_family
from unirl.testing.kernels import check_kernel
from unirl.testing.language import check_language_model
from unirl.testing.reward import check_reward

__all__ = [
    "check_algorithm",
    "check_engine",
    "check_environment",
    "check_family",
    "check_kernel",
    "check_language_model",
    "check_reward",
]

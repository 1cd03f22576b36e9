"""Checks for your own kernels, models, losses, rewards and engines. Each raises AssertionError with a sentence."""

from unirl.testing.algorithm import check_algorithm
from unirl.testing.kernels import check_kernel

__all__ = ["check_algorithm", "check_kernel"]

"""Checks that an extender runs on their own code. Each raises AssertionError with a sentence about what is wrong."""

from unirl.testing.algorithm import check_algorithm
from unirl.testing.kernels import check_kernel

__all__ = ["check_algorithm", "check_kernel"]

"""Benchmarks of the training loop with fixed work, and comparisons of their reports."""

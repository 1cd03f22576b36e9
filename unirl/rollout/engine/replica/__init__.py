"""Sampling with a second copy of the model."""

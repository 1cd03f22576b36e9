"""Sampling with the trained weights."""

"""Sampling on the weights that are trained."""

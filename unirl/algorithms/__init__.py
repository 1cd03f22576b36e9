"""Losses: one file each, over shared pure functions."""

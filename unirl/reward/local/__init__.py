"""Scorers that run in the process that asks."""

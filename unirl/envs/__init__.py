"""Environments in which policies act, behind the contract of `unirl.types.environments`."""

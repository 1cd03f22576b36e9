"""Losses, one file each. base.py has the contract and a map of the walk; shared/ has base classes and functions."""

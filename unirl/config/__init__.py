"""Recipes: composed, checked against the classes they name, and built."""

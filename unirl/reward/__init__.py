"""Scores of decoded media: components per sample, never silently missing."""

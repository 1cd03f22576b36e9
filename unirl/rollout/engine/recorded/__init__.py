"""Recorded samples instead of sampling."""

"""Scores media over HTTP: each reward in worker processes of its own, hostile media decoded apart from them."""

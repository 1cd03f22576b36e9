"""Engines: a request in, a response out."""

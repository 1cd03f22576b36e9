"""Containers of samples, requests and responses, and the Protocols between packages."""

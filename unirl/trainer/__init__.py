"""The loop, and who sits where."""

"""Reads image and video files that nobody has checked, within limits of size, memory and time. Needs no torch."""

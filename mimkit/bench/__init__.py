"""Measurements of speed, each beside the plain way of doing the same, in one run."""

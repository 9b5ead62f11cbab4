"""Measurements; see the docstring of each script."""

"""Whole training jobs, this package against plain Lightning."""

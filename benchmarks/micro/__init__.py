"""Single parts, apart from training."""

"""What a change of the numerics does to training."""

"""What MaxText makes of its rules: annotations of each tensor, resolved as Flax does."""

"""What a compiler made of a plan."""

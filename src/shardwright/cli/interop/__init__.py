"""`import` and `export`."""

"""Golden files, and the programs that regenerate them."""

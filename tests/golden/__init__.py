"""Golden files, and the programs that write them anew."""

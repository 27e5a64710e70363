"""The benchmarks of `make bench`: each module is a command that prints a table and writes it to benchmarks/results."""

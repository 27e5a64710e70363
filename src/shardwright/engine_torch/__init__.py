"""The PyTorch engine: it carries out on ranks what the core has decided, under the file names of the JAX engine."""

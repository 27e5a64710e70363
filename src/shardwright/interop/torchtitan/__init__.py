"""TorchTitan: parallel degrees, as its configurations state them, and the order in which they lay out ranks."""

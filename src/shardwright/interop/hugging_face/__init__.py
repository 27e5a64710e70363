"""Hugging Face: a ``config.json`` as a model of our table, and a tensor-parallel plan as a layout."""

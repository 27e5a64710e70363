"""Weights of the modules that rest as codes and scales.

copies.py           the copies of a weight that products need
coded_weight.py     the tensor type, and what fully_shard gathers of it
quantizing.py       which ranks agree on a scale, and the codes of several weights in one pass
state.py            a module's codes by their names: they rest, are saved and loaded
main_weights.py     keep_main_weights: what an optimizer updates
initialization.py   quantized_model_init
published.py        weights with their scales by published names
"""

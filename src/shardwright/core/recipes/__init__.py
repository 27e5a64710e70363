"""Recipes of low precision: how the operands of a linear layer's products are quantized, as data.

formats.py    the narrow number formats
recipe.py     a recipe: a quantizer for each operand of the three products
presets.py    the recipes by name
formula.py    how a quantizer makes codes and scales of an operand, and values of these
hadamard.py   the random Hadamard transform of an operand
random_bits.py random bits of a key and a counter
delayed.py    delayed scaling as a formula: a history of amaxes, and the factor that follows from it
kernels.py    which kernel multiplies two quantized operands on a chip
arrays.py     the functions of an engine's arrays that the formula needs
reading.py    a recipe from the values of a file
shown.py      a recipe as JSON values, and as a text
"""

"""From the parsed text to what the program does.

read.py         the entry point: reads a text into a program
program.py      a program in the terms of the core
collectives.py  its collectives, tensor by tensor
expansion.py    tensors that are expanded before they are sent
invariance.py   loop-invariant values
overlap.py      collectives with a product between start and done
stands_for.py   recognises in the text an operation that stands in for a collective of another kind
temporaries.py  the largest temporaries
flops.py        flops of matrix products
products.py     products with weights whose operands are quantized, and what they multiply
tool_chain.py   which compilers are installed
"""

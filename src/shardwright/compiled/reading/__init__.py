"""From the text to what the program does.

read.py         the door: a text in, a program out
program.py      a program in the core's words
collectives.py  its collectives, tensor by tensor
expansion.py    a tensor that a product made larger before it travels
invariance.py   what is the same in every turn of a loop
overlap.py      collectives with work between their begin and end
stands_for.py   a collective that a compiler made of another
temporaries.py  the largest values held for a while
flops.py        products of matrices, counted
tool_chain.py   which compilers are installed
"""

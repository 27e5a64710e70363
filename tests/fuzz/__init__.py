"""Damaged and invented input for every command, in process: ``python -m tests.fuzz --cases 7000 --seed 1``.

seeds      real files and command lines that the cases start from
forging    checkpoints with right digests that are wrong
mutating   damage to a text, to a value, to a program and to a command line
kinds      one generator for each kind of input: a folder with files, and the command line that reads them
running    one case: its exit code, what it says, how long it takes and what it holds
"""

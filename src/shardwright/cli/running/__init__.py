"""`train` and `compile`: an engine is loaded.

train.py          `train`
ranks.py          the ranks that one command starts
compile.py        `compile`
compile_torch.py  `compile --engine torch`
compiled.py       what `compile` answers, whatever the engine
"""

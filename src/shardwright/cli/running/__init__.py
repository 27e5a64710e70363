"""The commands that load an engine: `train`, `compile` and `calibrate`.

train.py          `train`
calibrate.py      `calibrate`
ranks.py          the ranks that one command starts
compile.py        `compile`
checkpoint_layouts.py  what a load onto a layout reads, and the same checkpoint in its boxes
folders.py        `ckpt import` and `ckpt export` of the folders of other programs
compile_torch.py  `compile --engine torch`
compiled.py       the result of `compile`, for any engine
"""

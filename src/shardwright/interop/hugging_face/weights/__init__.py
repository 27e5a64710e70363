"""Weights in the files of Hugging Face: imported into a checkpoint of ours, and exported from one. Needs NumPy.

mapping.py      which elements of which published tensor are which box of ours
fitting.py      the tensors of a folder compared with those that a model needs
elements.py     elements of a published tensor in our dims, cast or dequantised
model.py        the model of a folder or of a checkpoint
beside.py       the tokenizer and other files beside the weights
fp8.py          weights exported in FP8, with scales
importing.py    from a folder to a checkpoint
direct.py       a folder as the weights that a run begins with
shards.py       the files of an exported folder, written in place
config_text.py  the configuration of an exported folder
exporting.py    from a checkpoint to a folder
"""

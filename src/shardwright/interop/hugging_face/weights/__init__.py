"""Weights in the files of Hugging Face: imported into a checkpoint of ours, and exported from one. Needs NumPy.

mapping.py           which elements of which published tensor are which box of ours
safetensors_file.py  the header of a safetensors file, validated
folder.py            a model folder: its configuration, its files, and every tensor in them
fitting.py           the tensors of a folder compared with those that a model needs
casting.py           elements in another floating-point dtype
model.py             the model of a folder or of a checkpoint
importing.py         from a folder to a checkpoint
shards.py            the files of an exported folder, written in place
exporting.py         from a checkpoint to a folder
"""

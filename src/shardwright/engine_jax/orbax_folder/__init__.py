"""Folders of Orbax: imported into a checkpoint of ours, and exported from one.

folder.py     which leaves a folder holds, and where
arrays.py     its arrays and texts, read by TensorStore
importing.py  a folder becomes a checkpoint
writing.py    how Orbax writes an array that is read box by box
exporting.py  a checkpoint becomes a folder
"""

from shardwright.engine_jax.orbax_folder.exporting import export_folder
from shardwright.engine_jax.orbax_folder.importing import import_folder

__all__ = ["export_folder", "import_folder"]

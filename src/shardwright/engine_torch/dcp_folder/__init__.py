"""Folders of ``torch.distributed.checkpoint``: imported into a checkpoint of ours, and exported from one.

pickled.py    the pickled metadata, read as data
folder.py     what a folder holds, and where
elements.py   the tensors and values in its data files
program.py    the entries of ``get_state_dict`` as those that engine_torch.load reads
importing.py  a folder becomes a checkpoint
exporting.py  a checkpoint becomes a folder
"""

from shardwright.engine_torch.dcp_folder.exporting import export_folder
from shardwright.engine_torch.dcp_folder.importing import import_folder

__all__ = ["export_folder", "import_folder"]

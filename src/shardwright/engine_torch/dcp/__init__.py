"""For programs that call ``torch.distributed.checkpoint``: its planners and storage over our checkpoints.

plan.py     what ranks declare of their state when a save or a load is planned
saving.py   SavePlanner and StorageWriter
loading.py  LoadPlanner and StorageReader
"""

from shardwright.engine_torch.dcp.loading import LoadPlanner, StorageReader
from shardwright.engine_torch.dcp.saving import SavePlanner, StorageWriter

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter"]

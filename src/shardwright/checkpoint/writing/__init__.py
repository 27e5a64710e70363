"""Writing a checkpoint: every process its boxes, one process the commit.

save.py        a save: every process writes its boxes, one commits
data_file.py   the file in which boxes are written
copies.py      copies of boxes in host memory, for asynchronous saves
merging.py     what all processes have written becomes the index and the manifest
resharding.py  a checkpoint again, in the boxes of another layout
retention.py   which old checkpoints are deleted
"""

"""The folder of a run's checkpoints: its names, and who may write there.

names.py       names of checkpoints
file_lock.py   an exclusive lock on a file
steps.py       what can be done with the steps of a folder: one type
on_disk.py     the steps of a folder of this machine: its first implementation
in_store.py    those of an object store: the second one
directory.py   the folder by its place
new_folder.py  a new folder of another program, which gets its name when it is complete
"""

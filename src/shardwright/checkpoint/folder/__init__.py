"""The folder of a run's checkpoints: its names, and who may write there.

directory.py   names of checkpoints in a run's folder, and who may write there
in_store.py    the same folder in an object store
file_lock.py   an exclusive lock on a file
new_folder.py  a new folder of another program, which gets its name when it is complete
"""

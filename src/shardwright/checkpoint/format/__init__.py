"""The files of a checkpoint.

manifest.py       what a checkpoint holds, and where each box is stored
read_manifest.py  reads and validates the manifest
part.py           the part file: the boxes that one process has written in a save
data_file.py      boxes in a safetensors file
dtypes.py         dtypes by name and width
fields.py         JSON values with their path in the file
regular_file.py   opens a file that is no pipe and no device
errors.py         the errors that a user can fix
"""

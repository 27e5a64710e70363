"""The files of a checkpoint.

manifest.py       what it holds, and where each box lies
read_manifest.py  the manifest from its file, believed after every field
part.py           the part of one process in a save
data_file.py      boxes in a safetensors file
dtypes.py         dtypes by name and width
fields.py         JSON values with their place
errors.py         what goes wrong and can be mended
"""

"""The files of a checkpoint.

manifest.py       which tensors a checkpoint holds, which processes wrote it, and the state of the run
read_manifest.py  reads and validates the manifest
part.py           the part file: the boxes that one process has written
index.py          the index: which process wrote which box, and whether boxes cover a tensor
pieces.py         the digests of a box, piece by piece
proof.py          when a file is proven damaged: in a store one read is no proof
arrays.py         small safetensors files of integers
header.py         the header of a safetensors file
dtypes.py         dtypes by name and width
fields.py         JSON values with their path in the file
errors.py         the errors that a user can fix
"""

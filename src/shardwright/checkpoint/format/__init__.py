"""The files of a checkpoint: the manifest, and the boxes in safetensors files."""

"""A model folder of Hugging Face as files: headers, dtypes and scales. Needs NumPy.

safetensors_file.py  the header of a safetensors file, validated
quantized.py         FP8 with a scale for each block, and its values
folder.py            a model folder: its configuration, its files, and every tensor in them
"""

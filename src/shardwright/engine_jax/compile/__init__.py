"""Compiling a step for devices that are not there.

compiling.py     the step, lowered and compiled for a target
target.py        the compilers' targets: TPU topologies, GPUs of gpu_targets.toml, CPUs
built_cache.py   compiled programs, kept between commands
"""

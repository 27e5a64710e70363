"""Compiling a step for devices that this machine does not have.

compiling.py     the step, lowered and compiled for a target
target.py        the compilers' targets: TPU topologies, GPUs of gpu_targets.toml, CPUs
built_cache.py   a cache of compiled programs, kept between commands
"""

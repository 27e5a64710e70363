"""What surrounds a function on ranks that compute: one thread, a group of all of them, warnings as errors.

The group is made for each function anew, and with it go all groups, meshes and caches that hang on it: 0.1 s.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.engine_torch.ranks import LIMIT_S


@cache
def _keep_what_was_imported() -> None:
    """It is no garbage, and need not be looked through for any. Once: a later call would keep the groups of functions
    that ran before, whose threads poll their sockets for as long as they live."""
    gc.freeze()


@contextmanager
def in_group(rank: int, num: int, path: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    _keep_what_was_imported()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path}",
            rank=rank,
            world_size=num,
            # Longer than the test waits, which ends them all: on a busy machine ranks start minutes apart.
            timeout=timedelta(seconds=8 * LIMIT_S),
        )
        yield
        _forget_groups()
        dist.destroy_process_group()


def _forget_groups() -> None:
    """DTensor remembers operations, with their meshes, and a mesh keeps its groups."""
    _clear_sharding_prop_cache()
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            getattr(mesh, "_pg_registry", {}).clear()

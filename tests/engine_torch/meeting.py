"""The context of a function on ranks that compute: one thread, a process group of all ranks, warnings as errors.

Each function gets a new process group. At its end, all groups, meshes and caches that belong to it are freed: 0.1 s.
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
    """Exclude imported modules from garbage collection, and collect rarely: each function ends with a collection. Once: a later
    call would keep the groups of earlier functions, whose threads poll their sockets until they are freed."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


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
            # Longer than the test waits, and the test ends all ranks: on a busy machine ranks start minutes apart.
            timeout=timedelta(seconds=8 * LIMIT_S),
        )
        yield
        _forget_groups()
        dist.destroy_process_group()


def _forget_groups() -> None:
    """Clear DTensor's cache of operations, which keeps their meshes, and the meshes' references to groups."""
    _clear_sharding_prop_cache()
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            getattr(mesh, "_pg_registry", {}).clear()

"""Every name of PyTorch's that is not public, or differs between the versions supported, each with the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# 2.13 has names of one tensor in and one out, and deprecates those before them, which are all that 2.11 has.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's ``part`` along dim 0 of ``out``, in the order of the group."""
    _gather(out, part, group=group)


def reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part along dim 0 of the sum of ``whole`` over the group."""
    _scatter(out, whole, group=group)


def flattened(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The axes, mesh order, as one, with a group of its own: nothing public makes one from a part of a mesh.

    Through all axes it is the world, whose group there is already.
    """
    return mesh[tuple(axes)]._flatten("_".join(axes))


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Meshes of one dim each as one of several: slicing the root knows no flattened axes (2.13 warns, reversed order
    raises)."""
    return DeviceMesh._concatenate(list(meshes))


@contextmanager
def imagined_ranks(count: int) -> Iterator[None]:
    """This process as rank 0 of ``count`` that are not there: collectives have shapes and groups, and move nothing.

    Nothing public makes such a group.
    """
    # Loaded here: it is among PyTorch's own tests, and no training needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_values() -> AbstractContextManager[object]:
    """Tensors with shapes and no values: nothing public makes them for a whole program."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def group_of(arguments: Iterable[object]) -> dist.ProcessGroup:
    """The group among an operation's arguments, which PyTorch hands on in a box of its own."""
    boxed = next(one for one in arguments if isinstance(one, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def storage_key(storage: torch.UntypedStorage) -> int:
    """What two views of one storage have in common: Python's objects for it come and go."""
    return storage._cdata


def sum_gradients(module: FSDPModule) -> None:
    """Gradients over ranks are summed, not averaged: the step divides by the tokens of all, once.

    Without the second call PyTorch multiplies on the way (``PREMUL_SUM``), which gloo cannot.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)

"""What modules have that are made of modules: where they lie and what their values are is that of their parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules.attention.dot_product import DotProductAttention
from shardwright.engine_torch.modules.parts.tensor_parallel import mesh_of


class ComposedModule(nn.Module):
    """``set_parallel_mode``: tp shards heads and hidden units; otherwise all is replicated, and attention has all heads."""

    def __init__(
        self,
        name: str | None,
        *,
        set_parallel_mode: bool,
        sequence_parallel: bool,
        tp_size: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.label = type(self).__name__ + (f" '{name}'" if name else "")
        self.set_parallel_mode, self.tp_size = set_parallel_mode, tp_size
        self.device = torch.get_default_device() if device is None else torch.device(device)
        if sequence_parallel and not set_parallel_mode:
            raise InputError(
                f"{self.label}: sequence_parallel=True needs set_parallel_mode=True: the column-parallel layers gather the tokens that "
                f"attention needs."
            )

    def place(
        self, tp_group: dist.ProcessGroup | None, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None
    ) -> None:
        """As the constructor is asked to, when all parts are there. A mesh comes before a group."""
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh, weight_mesh)
        if tp_mesh is None:
            self.set_tensor_parallel_group(tp_group)

    def set_device_mesh(
        self,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        *,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        """As ``ParallelModule.set_device_mesh``, of all parts."""
        for child in self.children():
            if self.set_parallel_mode or not isinstance(child, DotProductAttention):
                child.set_device_mesh(tp_mesh, weight_mesh, amax_group=amax_group)  # pyright: ignore[reportCallIssue]
        if tp_mesh is not None:
            self.tp_size = tp_mesh.size()

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """As ``set_device_mesh``, of a group; a program with ``fully_shard`` needs a mesh."""
        if tp_group is not None:
            self.set_device_mesh(mesh_of(tp_group, self.tp_size, self.device, self.label))

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """As ``DotProductAttention.set_context_parallel_group``, of all attention; positions of ``rotary_pos_emb`` follow, and an encoder has its
        tokens sharded alike."""
        for child in self.children():
            if isinstance(child, (ComposedModule, DotProductAttention)):
                child.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As ``ParallelModule.reset_parameters``, of all parts."""
        for child in self.children():
            child.reset_parameters(defer_init)  # pyright: ignore[reportCallIssue]


def named(name: str | None, child: str) -> str:
    """The name of a part."""
    return child if name is None else f"{name}.{child}"

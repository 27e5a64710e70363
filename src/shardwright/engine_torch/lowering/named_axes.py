"""Names of axes that other programs ask a mesh for, on the mesh of a user's own module."""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.named_axes import named_axes
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.private import named


def name_axes(mesh: DeviceMesh, plan: Plan) -> None:
    """Add ``dp``, ``batch``, ``loss`` and ``dp_shard_cp`` to the mesh of a plan, for ``mesh.get_group("loss")``, also those of one rank.

    An axis of the plan keeps its name. Warns where it has such a name, and other ranks than programs expect under it.
    """
    for name, axes in named_axes(plan).items():
        needed = plan.mesh.larger_than_one(axes)
        if name not in plan.mesh.names:
            named(mesh, needed, name)
        elif plan.mesh.larger_than_one((name,)) != needed:
            of_axes = f" ({' and '.join(needed)})" if needed else ""
            warnings.warn(
                f"the plan's axis '{name}' has {plan.mesh.size(name)} ranks, and under that name other programs expect "
                f"{plan.mesh.size(needed)}{of_axes}. mesh['{name}'] is the plan's axis: give it another name in the layout, if a loader or "
                f"a loss asks for '{name}'.",
                stacklevel=3,
            )

"""Layouts for a user's own program: from a pytree of weights to a tree of shardings."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from shardwright.core.findings.errors import InputError, raise_errors
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.lowering.shardings import weight_shardings


def shapes_of(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and dtype of each leaf of a pytree (arrays or ``jax.ShapeDtypeStruct``), by its path: ``layers/0/q``.

    >>> import numpy as np
    >>> shapes_of({"layers": [{"q": np.zeros((8, 2), np.float32)}]})
    {'layers/0/q': ((8, 2), 'float32')}
    """
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _named_leaves(tree)}


def named_shardings(plan: Plan, mesh: Mesh, tree: Any) -> Any:
    """A tree like ``tree`` with the ``NamedSharding`` of each leaf at rest, for ``jax.device_put`` or ``jax.jit``.

    Raises FindingsError for a plan with errors, and InputError for a plan of another engine, for a mesh that is not the
    plan's, for a leaf that is not in the plan and for a shape that is not the plan's.
    """
    if plan.request.engine != "jax":
        raise InputError(
            f"the plan is for '{plan.request.engine}', which shards other dims of the weights at rest. Make it from a Request "
            f"with engine='jax'."
        )
    raise_errors(plan.findings)
    if dict(mesh.shape) != dict(plan.mesh.shape):
        found = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        raise InputError(
            f"the mesh is {found}, and the plan is for {plan.mesh}. Make it from the plan: device_mesh(plan.mesh)."
        )
    shardings = weight_shardings(plan, mesh)
    planned = {row.name: (row.num, *row.shape) if row.stack is not None else row.shape for row in plan.weights}
    for name, leaf in _named_leaves(tree):
        if name not in planned:
            raise InputError(f"the plan has no weight '{name}'. {did_you_mean(name, planned)}")
        if tuple(leaf.shape) != planned[name]:
            raise InputError(f"weight '{name}' has shape {tuple(leaf.shape)}; it was planned as {planned[name]}.")
    return jax.tree_util.tree_map_with_path(lambda path, _: shardings[_name(path)], tree)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

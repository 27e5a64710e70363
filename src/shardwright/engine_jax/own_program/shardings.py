"""Layouts for a user's own program: from a pytree of weights, or of what is kept for them, to a tree of shardings."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.findings.errors import InputError, raise_errors
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.lowering.shardings import weight_shardings

MOST_FREE = 1024
"""Elements of a leaf that belongs to no weight: a count of steps, coefficients, the key of a generator."""


def shapes_of(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and dtype of each leaf of a pytree (arrays or ``jax.ShapeDtypeStruct``), by its path: ``layers/0/q``.

    Raises InputError for leaves that are no arrays, as the functions of an equinox module.

    >>> import numpy as np
    >>> shapes_of({"layers": [{"q": np.zeros((8, 2), np.float32)}]})
    {'layers/0/q': ((8, 2), 'float32')}
    """
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _named_arrays(tree)}


def named_shardings(plan: Plan, mesh: Mesh, tree: Any) -> Any:
    """A tree like ``tree`` with the ``NamedSharding`` of each leaf at rest, for ``jax.device_put`` or ``jax.jit``.

    Raises FindingsError for a plan with errors, and InputError for a plan of another engine, for a mesh that is not the
    plan's, for a leaf that is not in the plan and for a shape that is not the plan's.
    """
    shardings, planned = _shardings(plan, mesh), _planned(plan)
    for name, leaf in _named_arrays(tree):
        if name not in planned:
            raise InputError(f"the plan has no weight '{name}'. {did_you_mean(name, planned)}")
        if tuple(leaf.shape) != planned[name]:
            raise InputError(f"weight '{name}' has shape {tuple(leaf.shape)}; it was planned as {planned[name]}.")
    return jax.tree_util.tree_map_with_path(lambda path, _: shardings[_name(path)], tree)


def state_shardings(plan: Plan, mesh: Mesh, tree: Any) -> Any:
    """A tree like ``tree``, as an optimizer's state, with the ``NamedSharding`` of each leaf.

    | leaf | its sharding |
    |---|---|
    | its path has the path of a weight in it, as ``0/mu/layers/0/q``, and its shape is the weight's | that of the weight at rest |
    | any other, as a count of steps, or a mean of a weight's rows | replicated |

    Raises FindingsError and InputError as ``named_shardings`` does for the plan and the mesh, and InputError for a leaf of more than
    1,024 elements that has no weight's path in its own.
    """
    shardings, planned = _shardings(plan, mesh), _planned(plan)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        name, shape = _name(path), np.shape(leaf)
        weight = _weight_in(name, planned)
        if weight is None and prod(shape) > MOST_FREE:
            raise InputError(
                f"'{name}' has shape {shape}, and no weight's path is a part of its own: how it is to be sharded cannot be known. Make the "
                f"state from the tree of weights that was planned, or give this leaf a sharding of your own."
            )
        return shardings[weight] if weight is not None and planned[weight] == shape else everywhere

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def _shardings(plan: Plan, mesh: Mesh) -> Mapping[str, NamedSharding]:
    """Those of the weights at rest, of a plan without errors on its own mesh."""
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
    return weight_shardings(plan, mesh)


def _planned(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    return {row.name: (row.num, *row.shape) if row.stack is not None else row.shape for row in plan.weights}


def _weight_in(name: str, planned: Mapping[str, tuple[int, ...]]) -> str | None:
    """The weight whose path is a part of a path: the longest, and of these the last.

    >>> _weight_in("0/mu/layers/q/value", {"q": (), "layers/q": (), "layers": ()})
    'layers/q'
    """
    words = name.split("/")
    for length in range(len(words), 0, -1):
        for start in range(len(words) - length, -1, -1):
            if (part := "/".join(words[start : start + length])) in planned:
                return part
    return None


def _named_arrays(tree: Any) -> list[tuple[str, Any]]:
    leaves = _named_leaves(tree)
    others = [(name, leaf) for name, leaf in leaves if _not_an_array(leaf)]
    if others:
        name, leaf = others[0]
        more = f", and {len(others) - 1} more such leaves" if len(others) > 1 else ""
        raise InputError(
            f"'{name}' is {_not_an_array(leaf)}{more}: only arrays are sharded by a plan. Give the tree of the weights alone, as "
            f"eqx.filter(model, eqx.is_inexact_array) of equinox and nnx.state(model, nnx.Param) of flax."
        )
    return leaves


def _not_an_array(leaf: Any) -> str:
    """What a leaf is that is no array of numbers; an empty text for one that is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return (
            f"the function '{getattr(leaf, '__name__', type(leaf).__name__)}'"
            if callable(leaf)
            else f"the value {leaf!r:.40}"
        )
    return "a key of a random generator" if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else ""


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")

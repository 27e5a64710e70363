"""The leaves of a user's own pytree by name: what of each is a tensor of a checkpoint, and what is a value.

| leaf | in the checkpoint |
|---|---|
| ``jax.Array`` of any sharding, NumPy array | a tensor |
| typed PRNG key | a tensor of its data, and the name of its implementation |
| Python number, text, bool | a value |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardwright.checkpoint import CheckpointError, TensorInfo
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.engine_jax.training.state import box_of
from shardwright.runs.own_program.entries import EMPTY_NODES, PATHS
from shardwright.runs.own_program.held import HeldShard, HeldTensor
from shardwright.runs.own_program.values import encoded, with_keys

Read = Callable[[str, Sequence[Box]], Sequence[np.ndarray]]
"""``read(name, boxes)``: several boxes of a tensor of the checkpoint, in the dtype of the leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The leaves of a tree for a save: tensors, JSON values, and the implementation of each key."""

    tensors: tuple[HeldTensor, ...]
    values: Mapping[str, Any]
    keys: Mapping[str, str]


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, as ``layers/0/q``. Raises InputError for two leaves of one name."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "leaf"
        if name in found:
            raise InputError(
                f"two leaves are called '{name}': a key has a '/', or a number and a text are keys of one mapping."
            )
        found[name] = leaf
    return found


def shape_of_tree(tree: Any) -> Mapping[str, Any]:
    """What names do not say of a tree, for a folder of another program: as JSON, by the keys of a checkpoint's values.

    The paths of leaves inside lists, and the nodes that have no leaves.

    >>> shape_of_tree({"a": [1.0], "b": {}})
    {'paths': {'a/0': ['a', 0]}, 'empty': [[['b'], 'Dict']]}
    """
    paths: dict[str, list[str | int]] = {}
    empty: list[Any] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]:
        keys = [_key(one) for one in path]
        if _is_empty(node):
            kind = (
                "None" if node is None or hasattr(node, "_fields") else "Dict" if isinstance(node, Mapping) else "List"
            )
            empty.append([keys, kind])
        elif any(type(key) is int for key in keys):
            paths[jax.tree_util.keystr(path, simple=True, separator="/")] = keys
    return {PATHS: with_keys(paths), EMPTY_NODES: empty}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def _key(one: Any) -> str | int:
    """A part of a path: the number of an entry of a list, or the text of any other key."""
    if isinstance(one, jax.tree_util.SequenceKey):
        return one.idx
    return jax.tree_util.keystr((one,), simple=True)


def held(tree: Any, *, lasting: bool = False) -> Held:
    """What this process holds of a tree. ``lasting``: none of its ``jax.Array``s will be donated or deleted. Raises InputError for an array that was donated, CheckpointError for other leaves."""
    tensors: list[HeldTensor] = []
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name, leaf in leaves_of(tree).items():
        if is_key(leaf):
            _require_elements(name, leaf)
            keys[name] = str(jax.random.key_impl(leaf))
            tensors.append(_of_array(name, jax.random.key_data(leaf), lasting))
        elif isinstance(leaf, jax.Array):
            _require_elements(name, leaf)
            tensors.append(_of_array(name, leaf, lasting))
        elif isinstance(leaf, np.ndarray | np.generic) and not isinstance(leaf, np.ma.MaskedArray):
            tensors.append(_of_numpy(name, np.asarray(leaf)))
        else:
            require_value(name, leaf)
            values[name] = encoded(leaf, f"'{name}'")
    return Held(tensors=tuple(tensors), values=values, keys=keys)


def require_value(name: str, leaf: Any) -> None:
    """Raise CheckpointError for a function, as those in the modules of equinox."""
    if callable(leaf):
        raise CheckpointError(
            f"'{name}' is the function '{getattr(leaf, '__name__', type(leaf).__name__)}': a checkpoint holds arrays and values. Take the arrays "
            f"of the tree, as eqx.partition(model, eqx.is_array) of equinox does, and put them back after a load, as eqx.combine does.",
            code="SW504",
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a tensor in a checkpoint."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Those of a leaf's tensor: of a key, of its data."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    # Without the order of bytes, which a NumPy array may have of its own.
    return tuple(leaf.shape), leaf.dtype.name


def held_dtype(leaf: Any) -> str:
    """The dtype that an array like a leaf gets: without ``jax_enable_x64``, JAX makes 32 bits of 64."""
    dtype = shape_and_dtype(leaf)[1]
    return dtype if isinstance(leaf, np.ndarray | np.generic) else jax.dtypes.canonicalize_dtype(dtype).name


def made(name: str, leaf: Any, read: Read, implementation: str | None) -> Any:
    """A leaf like ``leaf`` with the elements of the checkpoint; each device's boxes are read, and no others.

    Raises InputError for keys of another implementation, for a sharding that JAX does not permit, and for a leaf of several
    processes without a sharding.
    """
    shape, _ = shape_and_dtype(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        [array] = read(name, [Box.whole(shape)])
        return array[()] if isinstance(leaf, np.generic) else array
    sharding = sharding_of(name, leaf)
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        # A sharding that JAX does not permit for the shape: of a dim that its axes do not divide.
        raise InputError(f"'{name}': {str(error).splitlines()[0]}") from error
    # All at once: what several devices need is read once. Replicas have the same box.
    boxes = list(dict.fromkeys(box_of(index or (), shape) for index in indices))
    known = dict(zip(boxes, read(name, boxes), strict=True))
    if _is_free(leaf):
        # Put nowhere by the program, so JAX may use it beside arrays of any sharding. One that is put on a device it may not.
        [element] = known.values()
        array = jnp.asarray(element)
    else:
        array = jax.make_array_from_callback(shape, sharding, lambda index: known[box_of(index or (), shape)])
    if not is_key(leaf):
        return array
    key = jax.random.wrap_key_data(array, impl=implementation)
    if key.dtype != leaf.dtype:
        raise InputError(f"'{name}': the checkpoint has keys of {key.dtype} ({implementation}), needed {leaf.dtype}.")
    if leaf.sharding is not None and key.sharding != leaf.sharding and key.is_fully_addressable:
        # On one device, JAX leaves the dim of the words in the sharding of keys.
        return jax.device_put(key, leaf.sharding)
    return key


def sharding_of(name: str, leaf: Any) -> Sharding:
    """How a leaf's tensor is sharded: as ``leaf`` is, or on the first device, where there is no other or nothing to shard. The words of a
    key are never sharded."""
    sharding = leaf.sharding
    if sharding is None:
        if jax.process_count() > 1:
            raise InputError(f"'{name}': with several processes, give its jax.ShapeDtypeStruct a sharding.")
        return SingleDeviceSharding(jax.devices()[0])
    if is_key(leaf) and isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        return NamedSharding(sharding.mesh, PartitionSpec(*spec, None))
    return sharding


def _is_free(leaf: Any) -> bool:
    """Whether a program left to JAX where a leaf is, as the count of steps in an optimizer's state."""
    return leaf.sharding is None if isinstance(leaf, jax.ShapeDtypeStruct) else not leaf.committed


def without_sharding(leaves: Mapping[str, Any]) -> list[str]:
    """The arrays that should be sharded and do not say how, where there are several devices to choose from; one element may be anywhere."""
    if jax.process_count() > 1 or jax.device_count() == 1:
        return []
    return [
        name
        for name, leaf in leaves.items()
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None and leaf.shape
    ]


def _require_elements(name: str, array: jax.Array) -> None:
    try:
        deleted = array.is_deleted()
    except (AttributeError, TypeError):
        raise InputError(f"'{name}' is traced: call save outside of jax.jit.") from None
    if deleted:
        raise InputError(f"'{name}' was deleted or donated to a jitted function: save what the function returned.")


def _of_array(name: str, array: jax.Array, lasting: bool) -> HeldTensor:
    spec = str(array.sharding.spec) if isinstance(array.sharding, NamedSharding) else ""
    return HeldTensor(
        info=TensorInfo(name=name, shape=tuple(array.shape), dtype=str(array.dtype), spec=spec),
        shards=tuple(
            HeldShard(box_of(shard.index, array.shape), _reader(name, shard), "always" if lasting else "now")
            for shard in array.addressable_shards
        ),
    )


def _of_numpy(name: str, array: np.ndarray) -> HeldTensor:
    info = TensorInfo(name=name, shape=array.shape, dtype=array.dtype.name)
    return HeldTensor(info=info, shards=(HeldShard(Box.whole(array.shape), lambda: array),))


def _reader(name: str, shard: jax.Shard) -> Callable[[], np.ndarray]:
    data = shard.data
    assert data is not None, name

    def read() -> np.ndarray:
        if data.is_deleted():
            raise CheckpointError(
                f"'{name}' was deleted or donated to a jitted function before it was written. Leave copy=False out of Saver."
            )
        return np.asarray(data)

    return read

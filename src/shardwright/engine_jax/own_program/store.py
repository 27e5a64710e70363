"""Saves a user's own pytree of arrays, sharded in whatever way, and loads it on any other sharding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright.checkpoint import Checkpoint, Keep
from shardwright.checkpoint.exchange.passing import Together, together_or_alone
from shardwright.checkpoint.exchange.wants import Want, needed_by_all, wants_of
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import chosen
from shardwright.engine_jax.io.exchange import LOST, ProcessCarrier, gathered
from shardwright.engine_jax.own_program.leaves import (
    held,
    held_dtype,
    is_array,
    is_key,
    leaves_of,
    made,
    require_value,
    shape_and_dtype,
    shape_of_tree,
    sharding_of,
    without_sharding,
)
from shardwright.engine_jax.training.state import box_of
from shardwright.runs import Reads
from shardwright.runs.own_program.background import BackgroundSaves
from shardwright.runs.own_program.fitting import misfits, require_none, value_misfits
from shardwright.runs.own_program.members import Members, alone, connected
from shardwright.runs.own_program.store import JAX, ProgramState, open_program, save_program, values_of
from shardwright.runs.own_program.values import with_keys
from shardwright.storage.url import Place

LEAVES, KEYS = "leaves", "keys"
WORDS = {"key": "a key of a generator", "array": "an array"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A tree that was loaded, and the step at which it was saved. ``kept``: the leaves that were not asked for."""

    tree: Any
    step: int
    kept: tuple[str, ...]


def save(
    folder: Place | str, tree: Any, *, step: int, keep: Keep = None, metrics: Mapping[str, float] | None = None
) -> Place:
    """Save a pytree as the checkpoint of a step, and return its directory. Every process calls this.

    Leaves are ``jax.Array``s of any sharding, typed PRNG keys, NumPy arrays, and Python numbers, texts and bools; their names are
    their paths. Each box is written once, by a process that holds it. Replicas are compared, also those of one process's
    devices. ``keep``: how many of the newest checkpoints are kept, or rules (``Retention``); None keeps all. ``metrics``:
    finite numbers of the step, as its loss.

    Raises, in all processes and with nothing saved: InputError for an array that was donated, CheckpointError for replicas that
    differ, for other leaves, and for what cannot be written.
    """
    members = processes()
    return save_program(folder, state_of(tree, members), step=step, members=members, keep=keep, metrics=metrics)


class Saver(BackgroundSaves):
    """Saves trees into a folder while the program goes on; a context.

    Each process copies the boxes that it writes to host memory, and a thread writes the copy. ``folder`` and ``keep``: as for
    ``save``. Every process makes one and calls its methods, as it calls ``save``.

    ``copy=False``: for a program that neither donates nor deletes the ``jax.Array``s that it saves. They do not change, so they are
    kept until they are written, and not copied; NumPy arrays still are. One that is donated all the same is an error of the next
    call.
    """

    def __init__(self, folder: Place | str, *, keep: Keep = None, copy: bool = True) -> None:
        super().__init__(folder, processes(), keep=keep)
        self._copy = copy

    def save(self, tree: Any, *, step: int, metrics: Mapping[str, float] | None = None) -> Place:
        """Begin to save a pytree as the checkpoint of a step, and return the directory that it will have.

        Returns when the state is copied: its arrays may be donated then, unless with ``copy=False``. Waits for the save before, if that is not complete.

        Raises as the function ``save`` does, and CheckpointError for a save before that failed.
        """
        return self.save_state(state_of(tree, self._members, lasting=not self._copy), step, metrics)


def state_of(tree: Any, members: Members, *, lasting: bool = False) -> ProgramState:
    """What this process holds of a tree. ``lasting``: as of ``held``. Raises in all processes as ``save`` does."""
    found = members.here("the tree to save", lambda: held(tree, lasting=lasting))
    return ProgramState(
        held=found.tensors,
        values={LEAVES: with_keys(found.values), KEYS: with_keys(found.keys), **shape_of_tree(tree)},
        framework=JAX,
        name=type(tree).__name__,
    )


def load(
    folder: Place | str,
    like: Any,
    *,
    step: int | None = None,
    only: Sequence[str] | None = None,
    cast: bool = False,
) -> Loaded:
    """Load a checkpoint as a tree like ``like``, however it was sharded when it was saved. Every process calls this.

    ``like``: its leaves have the shapes, dtypes and shardings that are wanted; ``jax.ShapeDtypeStruct``s may stand for arrays.
    ``folder``: what ``save`` was given, or the directory of one step; a path, or a URL as a text. ``step``: the newest by default. Names, shapes and dtypes must
    be equal. ``only``: patterns of the names to load (``*`` stands for any text); other leaves are those of ``like``. ``cast``:
    floating dtypes may differ.

    Raises, in all processes: CheckpointError that names every leaf that does not fit, DamagedError for damaged bytes.
    """
    members = processes()
    checkpoint = open_program(folder, step, members)
    names = members.here("comparing the checkpoint with the tree", lambda: _compared(checkpoint, like, only, cast=cast))
    source = _by_all(checkpoint, like, names, members)
    leaves = members.here(
        "reading the checkpoint", lambda: together_or_alone(source, lambda: _read(checkpoint, source, like, names))
    )
    structure = jax.tree_util.tree_structure(like)
    return Loaded(
        tree=jax.tree_util.tree_unflatten(structure, leaves),
        step=checkpoint.point.step,
        kept=tuple(name for name in leaves_of(like) if name not in names),
    )


def processes() -> Members:
    """The processes that ``jax.distributed`` connects; this one alone where there is no other."""
    count = jax.process_count()
    if count == 1:
        return alone()

    def gather(value: Any) -> list[Any]:
        return [json.loads(one) for one in gathered(json.dumps(value).encode())]

    return connected(jax.process_index(), count, "process", gather, LOST)


def _values_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The values and keys of a checkpoint. A state dict has values, and no keys of a generator."""
    return {LEAVES: {}, KEYS: {}, **values_of(checkpoint, JAX, lambda values: {LEAVES: values})}


def _compared(checkpoint: Checkpoint, like: Any, only: Sequence[str] | None, *, cast: bool) -> frozenset[str]:
    """The names to load, which fit."""
    values = _values_of(checkpoint)
    saved: Mapping[str, Any] = values[LEAVES]
    leaves = leaves_of(like)
    names = chosen(leaves, only)
    arrays = {name: leaf for name, leaf in leaves.items() if name in names and is_array(leaf)}
    for name, leaf in leaves.items():
        if name in names and name not in arrays:
            require_value(name, leaf)
    partial = only is not None
    wanted = {name: shape_and_dtype(leaf) for name, leaf in arrays.items()}
    # A name that is a value here and a tensor there is in both.
    other_kind = {name for name in names if name not in (saved if name not in wanted else checkpoint.tensors)}
    other_kind &= {*saved, *checkpoint.tensors}
    fitting = {name: one for name, one in wanted.items() if name not in other_kind}
    lines = misfits(checkpoint, fitting, unread=other_kind, cast=cast, partial=partial)
    values_of_tree = [name for name in leaves if name in names and name not in arrays and name not in other_kind]
    lines += value_misfits(
        {name: value for name, value in saved.items() if name not in other_kind}, values_of_tree, partial=partial
    )
    for name, leaf in leaves.items():
        if name in other_kind:
            lines.append(_of_other_kind(name, leaf, checkpoint, saved))
            continue
        if name in wanted and name in checkpoint.tensors and is_key(leaf) != (name in values[KEYS]):
            found, needed = ("array", "key") if is_key(leaf) else ("key", "array")
            lines.append(f"'{name}': found {WORDS[found]}, needed {WORDS[needed]}")
        if name in names and name in saved and name not in wanted and type(saved[name]) is not type(leaf):
            lines.append(f"'{name}': found {saved[name]!r:.80}, needed {_a(leaf)}")
        if name in wanted and (becomes := held_dtype(leaf)) != wanted[name][1]:
            lines.append(
                f"'{name}': JAX makes {becomes} of {wanted[name][1]} while jax_enable_x64 is off. Turn it on, or give a NumPy array "
                f"for this leaf."
            )
    require_none(checkpoint, lines, cast=cast, partial=partial)
    unplaced = without_sharding(arrays)
    if unplaced:
        more = f" and {len(unplaced) - 1} more have" if len(unplaced) > 1 else " has"
        raise InputError(
            f"'{unplaced[0]}'{more} no sharding, and there are {jax.device_count()} devices. Give each jax.ShapeDtypeStruct one: of a plan's "
            f"weights named_shardings(plan, mesh, tree) has them, of an optimizer's state state_shardings(plan, mesh, tree), and "
            f"jax.sharding.SingleDeviceSharding(jax.devices()[0]) is the first device."
        )
    without = [name for name, leaf in leaves.items() if name not in names and isinstance(leaf, jax.ShapeDtypeStruct)]
    if without:
        raise InputError(
            f"only: '{without[0]}' is not loaded, and has no value to keep: give an array, or load it too."
        )
    return names


def _of_other_kind(name: str, leaf: Any, checkpoint: Checkpoint, saved: Mapping[str, Any]) -> str:
    """The line of a leaf that is an array where the checkpoint has a value, or the other way round."""
    if not is_array(leaf):
        info = checkpoint.tensors[name]
        return f"'{name}': found {info.dtype} {info.shape}, needed {_a(leaf)}"
    shape, dtype = shape_and_dtype(leaf)
    return f"'{name}': found the value {saved[name]!r:.80}, needed an array, {dtype} {shape}"


def _a(leaf: Any) -> str:
    """
    >>> _a(3), _a("x")
    ('an int', 'a str')
    """
    kind = type(leaf).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _by_all(checkpoint: Checkpoint, like: Any, names: frozenset[str], members: Members) -> Reads:
    """What all processes read together, where they ask for the same leaves: each knows from a sharding what the others need."""
    leaves = {name: leaf for name, leaf in leaves_of(like).items() if name in names and is_array(leaf)}
    described = [
        [name, *map(str, shape_and_dtype(leaf)), repr(getattr(leaf, "sharding", ""))] for name, leaf in leaves.items()
    ]
    if members.count == 1 or len(members.distinct(described)) > 1:
        return checkpoint

    def wants(name: str) -> Sequence[Want]:
        leaf = leaves[name]
        shape, _ = shape_and_dtype(leaf)
        if isinstance(leaf, np.ndarray | np.generic):
            return needed_by_all(shape, members.count)
        indices = sharding_of(name, leaf).devices_indices_map(shape)
        return wants_of((device.process_index, box_of(index or (), shape)) for device, index in indices.items())

    return Together(source=checkpoint, wants=wants, carrier=ProcessCarrier())


def _read(checkpoint: Checkpoint, source: Reads, like: Any, names: frozenset[str]) -> list[Any]:
    values = _values_of(checkpoint)

    def leaf_of(name: str, leaf: Any) -> Any:
        if name not in names:
            return leaf
        if not is_array(leaf):
            return values[LEAVES][name]
        dtype = np.dtype(shape_and_dtype(leaf)[1])

        def read(name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
            return [np.asarray(found, dtype) for found in source.read_boxes(name, boxes)]

        return made(name, leaf, read, values[KEYS].get(name))

    return [leaf_of(name, leaf) for name, leaf in leaves_of(like).items()]

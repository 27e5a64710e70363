"""Bytes from process to process, for loads that processes do together; a ``Carrier`` of the checkpoint store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.checkpoint.exchange.collectives import AllToAlls, carried_by
from shardwright.checkpoint.exchange.passing import starts
from shardwright.checkpoint.exchange.schedule import Move, Round

AXIS = "process"

LOST = (jax.errors.JaxRuntimeError, ValueError)
"""What an operation raises whose other process has ended: ValueError where NumPy asks for the result of one that had begun."""

Hops = tuple[tuple[int, ...], ...]
"""Of each hop the place to which each device of a mesh sends; -1: to none."""


class ProcessCarrier:
    """The processes that ``jax.distributed`` connects, each with one of its devices."""

    noun = "process"

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._devices = first

    def largest(self, number: int) -> int:
        mesh = self._mesh_of(tuple(range(self.count)))
        return int(self._run(_largest(mesh), mesh, np.array([number], np.int32))[0])

    def texts(self, text: str) -> Sequence[str]:
        return [data.decode() for data in gathered(text.encode())]

    def exchange(self, now: Round, sent: np.ndarray) -> np.ndarray:
        to, here = now.bytes_to(self.count), now.bytes_from(self.count)
        going, coming = starts(to), starts(here)
        arrived = np.empty(sum(here), np.uint8)
        # The processes of a ring have the same moves in the same order, and no others take part in its collectives.
        for move in now.moves:
            outgoing: list[tuple[int, int, np.ndarray]] = []
            for parcel in move.send.parcels if move.send else ():
                start = going[parcel.process]
                going[parcel.process] = stop = start + parcel.num_bytes
                outgoing.append((parcel.process, parcel.hop, sent[start:stop]))
            incoming: list[tuple[int, int, np.ndarray]] = []
            for parcel in move.arrivals:
                start = coming[parcel.process]
                coming[parcel.process] = stop = start + parcel.num_bytes
                incoming.append((parcel.process, parcel.hop, arrived[start:stop]))
            self._carry(move, outgoing, incoming)
        return arrived

    def _carry(
        self,
        move: Move,
        outgoing: Sequence[tuple[int, int, np.ndarray]],
        incoming: Sequence[tuple[int, int, np.ndarray]],
    ) -> None:
        """Sends the parcels of one ring, and fills those that arrive. Each with the other process, and its hop."""
        count = len(move.processes)
        ring = tuple(sorted(move.processes))
        mesh, how = self._mesh_of(ring), carried_by(move.steps, count)
        if isinstance(how, AllToAlls):
            place = {process: number for number, process in enumerate(ring)}
            for start in range(0, how.num_collectives * how.length, how.length):
                part = slice(start, start + how.length)
                rows = np.zeros((1, count, how.length), np.uint8)
                for process, _, data in outgoing:
                    _fill(rows[0, place[process]], data[part])
                found = self._run(_exchanged(mesh), mesh, rows)
                for process, _, data in incoming:
                    _fill(data[part], found[0, place[process]])
            return
        rows = np.zeros((1, how.num_hops, how.length), np.uint8)
        for _, hop, data in outgoing:
            _fill(rows[0, hop], data)
        found = self._run(_permuted(mesh, hops_of(move)), mesh, rows)
        for _, hop, data in incoming:
            _fill(data, found[0, hop])

    def _mesh_of(self, processes: tuple[int, ...]) -> Mesh:
        return Mesh(np.array([self._devices[process] for process in processes]), (AXIS,))

    def _run(self, program: Callable[[jax.Array], jax.Array], mesh: Mesh, local: np.ndarray) -> np.ndarray:
        """This process's part of the result. ``local``: its part of the array, along the first dim."""
        shape = (mesh.size * local.shape[0], *local.shape[1:])
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        [device] = [one for one in mesh.devices.flat if one.process_index == self.index]
        given = jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(local, device)])
        return np.asarray(program(given).addressable_shards[0].data)


def hops_of(move: Move) -> Hops:
    """The hops of a move on a mesh whose devices have the ring's processes in ascending order.

    So rings that begin at other places have one program.
    """
    processes = np.array(move.processes)
    order = np.argsort(processes)
    place = np.argsort(order)
    takers = move.steps.takers(len(processes))
    return tuple(map(tuple, np.where(takers < 0, -1, place[takers])[:, order].tolist()))


def gathered(data: bytes) -> list[bytes]:
    """What every process gives, by process. It is a barrier too."""
    count = jax.process_count()
    own = np.frombuffer(data, np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([len(own)], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = own
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(count, -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _fill(target: np.ndarray, data: np.ndarray) -> None:
    """As many bytes as both have, from the first on: one of them is padded."""
    size = min(len(target), len(data))
    target[:size] = data[:size]


@cache
def _largest(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        jax.shard_map(
            lambda one: jax.lax.pmax(one, AXIS), mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec()
        )
    )


@cache
def _exchanged(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(AXIS)

    def exchanged(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, AXIS, split_axis=1, concat_axis=1, tiled=True)

    return jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=spec, out_specs=spec))


@cache
def _permuted(mesh: Mesh, hops: Hops) -> Callable[[jax.Array], jax.Array]:
    """Of an array (devices, hops, bytes), row ``hop`` of each device goes to the device that the hop names."""
    spec = PartitionSpec(AXIS)

    def permuted(rows: jax.Array) -> jax.Array:
        pairs = [[(giver, taker) for giver, taker in enumerate(hop) if taker >= 0] for hop in hops]
        return jnp.stack([jax.lax.ppermute(rows[:, hop], AXIS, each) for hop, each in enumerate(pairs)], axis=1)

    return jax.jit(jax.shard_map(permuted, mesh=mesh, in_specs=spec, out_specs=spec))

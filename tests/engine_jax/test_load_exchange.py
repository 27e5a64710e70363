"""Loads of several processes over JAX's collectives, on simulated devices: each thread stands for a process with one device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.checkpoint import open_checkpoint
from shardwright.checkpoint.exchange import collectives, rings, units
from shardwright.checkpoint.exchange.passing import read_together
from shardwright.checkpoint.exchange.rings import Relay, Steps
from shardwright.checkpoint.exchange.schedule import Move
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from shardwright.engine_jax.io import exchange
from shardwright.engine_jax.io.exchange import ProcessCarrier, hops_of
from tests.checkpoint.states import same_bits
from tests.checkpoint.test_passing import Meeting, by_all
from tests.checkpoint.test_schedule import random_wants
from tests.checkpoint.test_streams import random_saved

COUNT = 4


class Hall:
    """Where threads meet that run one program: those of a mesh, and no others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[tuple[int, ...], tuple[threading.Barrier, dict[int, np.ndarray]]] = {}

    def run(self, program: Any, mesh: Mesh, index: int, local: np.ndarray) -> np.ndarray:
        devices = list(mesh.devices.flat)
        with self._lock:
            met = self._met.setdefault(tuple(device.id for device in devices), (threading.Barrier(len(devices)), {}))
        barrier, values = met
        values[index] = local
        if barrier.wait(20) == 0:
            locals_ = [jax.device_put(values[device.id], device) for device in devices]
            shape = (len(devices) * local.shape[0], *local.shape[1:])
            sharding = NamedSharding(mesh, PartitionSpec(exchange.AXIS))
            found = program(jax.make_array_from_single_device_arrays(shape, sharding, locals_))
            for shard in found.addressable_shards:
                values[shard.device.id] = np.asarray(shard.data)
        barrier.wait(20)
        mine = values[index]
        barrier.wait(20)
        return mine


class Simulated(ProcessCarrier):
    """A process that has the device of its number."""

    def __init__(self, index: int, meeting: Meeting, hall: Hall) -> None:
        self.index, self.count, self._meeting, self._hall = index, meeting.count, meeting, hall
        self._devices = dict(enumerate(jax.devices()))

    def texts(self, text: str) -> list[str]:
        return self._meeting.gather(self.index, text)

    def _run(self, program: Any, mesh: Mesh, local: np.ndarray) -> np.ndarray:
        return self._hall.run(program, mesh, self.index, local)


@pytest.mark.parametrize("latency_bytes", [0, 1 << 40], ids=["permutes", "all-to-alls"])
def test_processes_pass_on_what_they_read(latency_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BYTES_OF_A_COLLECTIVE", latency_bytes)
    monkeypatch.setattr(collectives, "SMALLEST", 16)
    monkeypatch.setattr(units, "UNIT_BYTES", 64)
    monkeypatch.setattr(rings, "ROUND_BYTES", 150)
    # So that a parcel goes in several all-to-alls.
    monkeypatch.setattr(collectives, "MOST_BYTES", 32 * COUNT)
    rng = np.random.default_rng(7)
    used: set[str] = set()
    with (
        patch.object(
            exchange, "_permuted", lambda *given, made=exchange._permuted: used.add("permutes") or made(*given)
        ),
        patch.object(
            exchange, "_exchanged", lambda *given, made=exchange._exchanged: used.add("all-to-alls") or made(*given)
        ),
    ):
        for number in range(4):
            saved = random_saved(rng, tmp_path / str(number))
            whole = Box.whole(saved.array.shape)
            needed = {one: [whole] for one in range(COUNT)} if number == 0 else random_wants(rng, whole.shape, COUNT)
            wants = wants_of((process, box) for process, boxes in needed.items() for box in boxes)
            hall = Hall()

            def read(one: Any, saved: Any = saved, needed: Any = needed, wants: Any = wants, hall: Hall = hall) -> Any:
                carrier = Simulated(one.index, one.meeting, hall)
                boxes = list(dict.fromkeys(needed[one.index]))
                return read_together(open_checkpoint(saved.directory), "w", boxes, wants, carrier)

            for process, arrays in enumerate(by_all(COUNT, read)):
                assert not isinstance(arrays, Exception), arrays
                for box, array in zip(dict.fromkeys(needed[process]), arrays, strict=True):
                    assert same_bits(array, saved.array[box.slices])
    assert ("permutes" if latency_bytes == 0 else "all-to-alls") in used


@pytest.mark.parametrize(
    ("steps", "sent"),
    [
        (Steps(turn=0, first=1, last=3, num_bytes=1), [{5: 0, 7: 2, 0: 1, 2: 5, 1: 7}, {5: 2, 7: 1, 0: 5, 2: 7, 1: 0}]),
        (Relay(unit=1, holders=2, each=2, num_bytes=1), [{7: 2, 0: 5}, {7: 1}]),
    ],
)
def test_the_hops_of_a_ring(steps: Steps | Relay, sent: list[dict[int, int]]) -> None:
    """By hand: a ring of five, in the order 5, 7, 0, 2, 1. By process, to whom it sends."""
    move = Move((5, 7, 0, 2, 1), steps, None, ())
    ring = sorted(move.processes)
    found = [{ring[giver]: ring[taker] for giver, taker in enumerate(hop) if taker >= 0} for hop in hops_of(move)]
    assert found == sent

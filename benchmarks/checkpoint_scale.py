"""A checkpoint of 671 billion parameters by 4,096 processes, without their data: planning, commit and open.

python -m benchmarks.checkpoint_scale [--quick]
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.checkpoint import Checkpoint, OwnedBox, RunPoint, TensorInfo, commit, open_checkpoint, saving
from shardwright.checkpoint.exchange.collectives import carried_by
from shardwright.checkpoint.exchange.loads import load_of
from shardwright.checkpoint.exchange.schedule import KeptNeeds, schedule_of, seed_of
from shardwright.checkpoint.exchange.wants import Want, wants_of_plan
from shardwright.checkpoint.format.part import StoredFile, data_name, declared_name, part_bytes, part_name
from shardwright.checkpoint.format.pieces import DIGEST_BYTES, PIECE_BYTES
from shardwright.checkpoint.writing.data_file import MAX_FILE_BYTES, described_file, grouped, header_of, joined
from shardwright.checkpoint.writing.merging import declared_bytes
from shardwright.checkpoint.writing.save import Save
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.optimizer import FIRST, SECOND

MODEL, SAMPLE = "deepseek3-671b", 4
SIZES = {"fsdp": 512, "tensor": 8}
LOADS = (
    ("fsdp-tp", {"fsdp": 512, "tensor": 8}),
    ("fsdp-tp", {"fsdp": 1024, "tensor": 4}),
    ("fsdp-tp", {"fsdp": 256, "tensor": 16}),
    ("hsdp", {"data": 64, "fsdp": 64}),
)
"""The layouts of loads; the first is that of the save."""

POINT = RunPoint(step=1, seed=0, data_position=0, model=MODEL, layout_name="fsdp-tp", layout_text="", mesh=SIZES)
NOTES = (
    "Every process is simulated in turn on this machine: part files are real, data files have their header and no data. "
    "Planning is the slowest of a sample of processes, which computes its schedule of every tensor: what it reads, what it sends to "
    "whom and when, and what it gets. Each time is that of the processor and that which went by: other programs used the machine too. Bytes read are those of all processes, over the bytes of the tensors, and are counted for the weights: moments have the same "
    "boxes.",
    "A collective of XLA has one length for all processes, of at least 4 KiB. Where all load what they saved, only norms are sent: few "
    "bytes in short parcels, of which collectives are mostly padding.",
)

Result = TypeVar("Result")
Boxes = Mapping[str, Sequence[Box]]


def plan_on(sizes: Mapping[str, int], name: str = "fsdp-tp") -> Plan:
    table = build(MODEL, {})
    layout = load_layout(name)
    return make_plan(Request(layout=layout, table=table, batch=4096, length=4096, mesh_sizes=sizes))


def boxes_of(plan: Plan, device: int) -> Boxes:
    """What a device saves."""
    found: dict[str, list[Box]] = {}
    for one in saved_boxes(plan, device):
        if one.saves:
            for prefix in ("", FIRST, SECOND):
                found.setdefault(prefix + one.weight, []).append(one.box)
    return found


def infos_of(plan: Plan) -> list[TensorInfo]:
    shapes = {row.name: row.shape if row.stack is None else (row.num, *row.shape) for row in plan.weights}
    names = [prefix + name for prefix in ("", FIRST, SECOND) for name in shapes]
    bare = {name: shapes[name.removeprefix(FIRST).removeprefix(SECOND)] for name in names}
    return [TensorInfo(name=name, shape=shape, dtype="float32") for name, shape in bare.items()]


@dataclass(frozen=True, slots=True, order=True)
class Took:
    """Seconds of the processor's time, and seconds that went by."""

    cpu_s: float
    wall_s: float

    def __str__(self) -> str:
        return f"{self.cpu_s:.2f} s CPU, {self.wall_s:.2f} s"


def timed(do: Callable[[], Result]) -> tuple[Took, Result]:
    started, began = time.perf_counter(), time.process_time()
    found = do()
    return Took(time.process_time() - began, time.perf_counter() - started), found


def planned_part(plan: Plan, device: int, infos: Mapping[str, TensorInfo]) -> list[tuple[list, bytes]]:
    """What one process writes: the boxes of each of its data files, and the header."""
    nothing = np.empty(0)
    owned = [
        (infos[name], OwnedBox(name=name, box=box, array=nothing))
        for name, boxes in boxes_of(plan, device).items()
        for box in boxes
    ]
    return [(list(group), header_of(group, 1)) for group in grouped(joined(owned, MAX_FILE_BYTES), MAX_FILE_BYTES)]


def write_without_data(save: Save, process: int, files: list[tuple[list, bytes]], infos: Sequence[TensorInfo]) -> None:
    directory = save.directory
    assert isinstance(directory, Path)
    numbers = {info.name: number for number, info in enumerate(infos)}
    stored: list[StoredFile] = []
    rows = []
    for number, (group, header) in enumerate(files):
        path, offset = directory / data_name(process, number), len(header)
        file = described_file(path, header, group)
        with path.open("wb") as opened:
            opened.write(header)
            opened.truncate(file.num_bytes)
        for box in group:
            digests = np.zeros((-(-box.num_bytes // PIECE_BYTES), DIGEST_BYTES), np.uint8)
            rows.append((numbers[box.info.name], number, box.stored(path.name, offset, digests)))
            offset += box.num_bytes
        stored.append(file)
    (directory / declared_name(process)).write_bytes(declared_bytes(infos))
    # Not durable: 4,096 calls of fsync measure the disk, and each process has one.
    (directory / part_name(process)).write_bytes(part_bytes(stored, rows, PIECE_BYTES))


def wants_on(plan: Plan) -> Mapping[str, Sequence[Want]]:
    wants = wants_of_plan(plan, lambda device: device)
    return {prefix + name: one for name, one in wants.items() for prefix in ("", FIRST, SECOND)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one process computes before a load: its rounds, the most bytes of a round at one end, and the bytes that it sends.

    With JAX: the collectives in which it sends them, and their bytes, with padding.
    """

    rounds: int
    most: int
    sent: int
    collectives: int
    padded: int


def planned_load(checkpoint: Checkpoint, plan: Plan, device: int) -> Planned:
    rounds = most = all_sent = collectives = padded = 0
    needs = KeptNeeds()
    for name, wants in wants_on(plan).items():
        found = schedule_of(checkpoint.stored(name), wants, device, seed_of(name), needs)
        rounds += found.num_rounds
        for one in map(found.round, range(found.num_rounds)):
            sent = sum(parcel.num_bytes for send in one.sends for parcel in send.parcels)
            most = max(most, sent, sum(parcel.num_bytes for parcel in one.arrivals))
            all_sent += sent
            carried = [carried_by(move.steps, len(move.processes)) for move in one.moves]
            collectives += sum(how.num_collectives for how in carried)
            padded += sum(how.bytes_sent for how in carried)
    return Planned(rounds=rounds, most=most, sent=all_sent, collectives=collectives, padded=padded)


def main() -> None:
    """Simulate all processes, and time what each of them and the first one does."""
    options = begin(__doc__, devices=1)
    sizes = {**SIZES, "fsdp": 64} if options.quick else SIZES
    loads = tuple((name, {**one, "fsdp": one["fsdp"] // 8}) for name, one in LOADS) if options.quick else LOADS
    plan = plan_on(sizes)
    infos = infos_of(plan)
    by_name = {info.name: info for info in infos}
    count = plan.mesh.num_devices
    sample = [device * (count - 1) // (SAMPLE - 1) for device in range(SAMPLE)]
    rows: list[tuple[str, str]] = []
    out = Path(tempfile.mkdtemp())
    try:
        slowest = max(timed(lambda device=device: planned_part(plan, device, by_name))[0] for device in sample)
        rows.append(("planning a save, slowest process", f"{slowest}"))
        with saving(out, 1) as save:
            for device in range(count):
                write_without_data(save, device, planned_part(plan, device, by_name), infos)
            took, directory = timed(lambda: commit(save, replace(POINT, mesh=plan.mesh.shape), num_processes=count))
        assert isinstance(directory, Path)
        rows.append(("commit by process 0", f"{took}"))
        took, _ = timed(lambda: open_checkpoint(directory))
        rows.append(("open, all files verified", f"{took}"))
        took, checkpoint = timed(lambda: open_checkpoint(directory, all_files=False))
        rows.append(("open by any other process", f"{took}"))
        lists = sum(path.stat().st_size for path in directory.iterdir() if path.suffix in (".index", ".json"))
        rows.append(("manifest, index and parts", f"{lists / 1e6:.0f} MB"))
        for name, other in loads:
            label = " x ".join(f"{axis} {size}" for axis, size in other.items())
            on = plan_on(other, name)
            slowest, each = Took(0.0, 0.0), list[Planned]()
            for device in sample:
                took, planned = timed(lambda on=on, device=device: planned_load(checkpoint, on, device))
                slowest = max(slowest, took)
                each.append(planned)
            rows.append((f"planning a load, {label}, slowest process", f"{slowest}"))
            rows.append((f"rounds, {label}", f"{max(one.rounds for one in each):,}"))
            in_flight = max(one.most for one in each)
            rows.append((f"most bytes of a round to or from a process, {label}", f"{in_flight / 1e6:.1f} MB"))
            collectives = max(one.collectives for one in each)
            rows.append((f"collectives of a process with JAX, {label}", f"{collectives:,}"))
            padding = sum(one.padded for one in each) / max(1, sum(one.sent for one in each))
            rows.append((f"bytes in them over those of parcels, {label}", f"{padding:.2f}"))
            # The moments have the boxes of the weights.
            weights = wants_of_plan(on, lambda device: device)
            took, load = timed(lambda weights=weights: load_of(checkpoint, weights, count))
            rows.append((f"bytes read over bytes of the tensors, {label}", f"{load.bytes_read / load.num_bytes:.3f}"))
            rows.append(
                (
                    f"most by a process over the mean, {label}",
                    f"{max(load.bytes_by_process) * count / load.bytes_read:.2f}",
                )
            )
            rows.append(
                (
                    f"bytes sent over bytes needed, {label}",
                    f"{load.bytes_passed_on / sum(one.needed_bytes for one in load.tensors):.3f}",
                )
            )
            print(f"{label}: {slowest}, and {took} for all", flush=True)
        rows.append(("memory of this process", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    for row in rows:
        print("  ".join(row), flush=True)
    keep(
        Found(
            name="checkpoint_scale",
            title=f"A checkpoint of {MODEL} by {count:,} processes",
            columns=["what", "figure"],
            rows=[list(row) for row in rows],
            headline="; ".join(f"{name} {value}" for name, value in rows[:3]),
            notes=NOTES,
            numbers=dict(rows),
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()

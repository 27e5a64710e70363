"""Saves and loads of one process against a raw write, torch.distributed.checkpoint and Orbax (where it is installed).

python -m benchmarks.checkpoint [--quick]
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo, open_checkpoint, save_checkpoint
from shardwright.core.boxes.box import Box

DEVICES, ROWS = 8, 1024
POINT = RunPoint(step=1, seed=0, data_position=0, model="bench", layout_name="", layout_text="", mesh={})
NOTES = (
    "Each round times every system once, in an order that is reversed from round to round; the page cache is warm for loads, so "
    "that a load measures copies and digests and not the disk. Ratios are of one round, their median is shown.",
    "Other cuts: saved in rows by 8 simulated devices, loaded in columns.",
    "How long an asynchronous save keeps a program is measured in checkpoint_pause.",
    "Memory of a load: the largest resident size above that before it, divided by the state, in a process of its own.",
)

Arrays = Mapping[str, np.ndarray]


def arrays_of(num_bytes: int) -> dict[str, np.ndarray]:
    """float32 (1024, columns) tensors of 64 MiB, or smaller ones."""
    count = max(4, num_bytes >> 26)
    columns = num_bytes // count // ROWS // 4 // DEVICES * DEVICES
    rng = np.random.default_rng(0)
    return {f"w{number}": rng.standard_normal((ROWS, columns), np.float32) for number in range(count)}


def in_rows(arrays: Arrays) -> list[OwnedBox]:
    step = ROWS // DEVICES
    return [
        OwnedBox(name=name, box=Box((row, 0), (row + step, array.shape[1])), array=array[row : row + step])
        for name, array in arrays.items()
        for row in range(0, ROWS, step)
    ]


def infos_of(arrays: Arrays) -> list[TensorInfo]:
    return [TensorInfo(name=name, shape=array.shape, dtype="float32") for name, array in arrays.items()]


class Raw:
    """The bytes of all arrays, one after the other, in one file."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def save(self, folder: Path) -> None:
        folder.mkdir()
        with (folder / "raw").open("wb") as file:
            for array in self.arrays.values():
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())

    def same(self, folder: Path) -> Any:
        found = [np.empty_like(array) for array in self.arrays.values()]
        with (folder / "raw").open("rb", buffering=0) as file:
            for array in found:
                view, done = array.reshape(-1).view(np.uint8).data, 0
                while done < len(view):
                    done += file.readinto(view[done:])
        return found

    other: Callable[[Path], Any] | None = None


class Ours:
    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, POINT, infos_of(self.arrays), in_rows(self.arrays))

    def same(self, folder: Path) -> Any:
        checkpoint = open_checkpoint(folder / "checkpoints" / "step-00000001")
        return [checkpoint.read_box(name) for name in self.arrays]

    def other(self, folder: Path) -> Any:
        checkpoint = open_checkpoint(folder / "checkpoints" / "step-00000001")
        found = []
        for name, array in self.arrays.items():
            width = array.shape[1] // DEVICES
            columns = [Box((0, at), (ROWS, at + width)) for at in range(0, array.shape[1], width)]
            known = dict(zip(columns, checkpoint.read_boxes(name, columns), strict=True))

            def part(index: Any, known: dict[Box, np.ndarray] = known, shape: Any = array.shape) -> Any:
                ranges = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
                return known[Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))]

            found.append(jax.make_array_from_callback(array.shape, sharded(1), part))
        return jax.block_until_ready(found)


class Dcp:
    def __init__(self, arrays: Arrays) -> None:
        import torch

        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(self.tensors, checkpoint_id=str(folder), no_dist=True)

    def same(self, folder: Path) -> Any:
        import torch
        from torch.distributed.checkpoint.state_dict_loader import load

        found = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(found, checkpoint_id=str(folder), no_dist=True)
        return found

    other: Callable[[Path], Any] | None = None


class Orbax:
    def __init__(self, arrays: Arrays) -> None:
        import orbax.checkpoint as ocp  # pyright: ignore[reportMissingImports]

        self.ocp = ocp
        self.tree = {name: jax.device_put(array, sharded(0)) for name, array in arrays.items()}

    def save(self, folder: Path) -> None:
        with self.ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute(), self.tree)

    def same(self, folder: Path) -> Any:
        return self._load(folder, 0)

    def other(self, folder: Path) -> Any:
        return self._load(folder, 1)

    def _load(self, folder: Path, dim: int) -> Any:
        like = {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharded(dim)) for name, one in self.tree.items()
        }
        with self.ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(folder.absolute(), like))


def sharded(dim: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec(*(["d"] if dim == 0 else [None, "d"])))


def systems_of(arrays: Arrays) -> dict[str, Any]:
    made: dict[str, Any] = {"raw": Raw(arrays), "ours": Ours(arrays), "dcp": Dcp(arrays)}
    try:
        made["orbax"] = Orbax(arrays)
    except ImportError:
        print("Orbax is not installed, and is left out", flush=True)
    return made


def timed(do: Callable[[], Any]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def memory_of_a_load(directory: Path) -> float:
    """In a process of its own: the growth of its resident memory, over the bytes of the state."""
    program = (
        "import sys\n"
        "from shardwright.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(status().split('VmHWM:')[1].split()[0]) * 1024\n"
        "before = peak()\n"
        "found = [checkpoint.read_box(name) for name in checkpoint.tensors]\n"
        "print((peak() - before) / sum(array.nbytes for array in found))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    return float(ended.stdout)


def main() -> None:
    """Time all systems."""
    options = begin(__doc__, devices=DEVICES)
    num_bytes = (1 << 28) if options.quick else (1 << 30)
    arrays = arrays_of(num_bytes)
    systems = systems_of(arrays)
    names = list(systems)
    times: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in names} for what in ("save", "same", "other")
    }
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        for number in range(options.blocks(5) + 1):
            for name in names if number % 2 else names[::-1]:
                at, system = folder / f"{name}-{number}", systems[name]
                took = {"save": timed(lambda system=system, at=at: system.save(at))}
                for what in ("same", "other"):
                    load = getattr(system, what)
                    if load is not None:
                        took[what] = timed(lambda load=load, at=at: load(at))
                if number:  # The first round warms up.
                    for what, seconds in took.items():
                        times[what][name].append(seconds)
                if name != "ours" or number < options.blocks(5):
                    shutil.rmtree(at)
        last = next(folder.glob("ours-*")) / "checkpoints" / "step-00000001"
        memory = memory_of_a_load(last)
    finally:
        shutil.rmtree(folder)
    rows, numbers = [], []
    for what, title in (("save", "save"), ("same", "load, same cuts"), ("other", "load, other cuts")):
        mine, row = times[what]["ours"], [title]
        for name in names:
            seconds = times[what][name]
            row.append(f"{statistics.median(seconds):.2f} s" if seconds else "-")
        best = [
            min(times[what][name][index] for name in names if name not in ("ours", "raw") and times[what][name])
            if any(times[what][name] for name in names if name not in ("ours", "raw"))
            else float("nan")
            for index in range(len(mine))
        ]
        ratio = statistics.median(one / other for one, other in zip(mine, best, strict=True))
        rows.append([*row, f"{ratio:.2f}"])
        numbers.append({"what": what, "seconds": times[what], "over_best": ratio})
    rows.append(["memory of a load, of the state", *[""] * names.index("ours"), f"{memory:.2f}"])
    rows = [[*row, *[""] * (len(names) + 2 - len(row))] for row in rows]
    numbers.append({"memory": memory})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    keep(
        Found(
            name="checkpoint",
            title=f"Save and load of {num_bytes >> 20:,} MiB by one process",
            columns=["what", *names, "ours over the best other"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[-1] or row[2]}" for row in rows),
            notes=(*NOTES, f"The benchmark itself took {peak:.1f} GB."),
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()

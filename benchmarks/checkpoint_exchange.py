"""Loads of one checkpoint by several ranks: together, and each for itself. Time, bytes read, and memory.

python -m benchmarks.checkpoint_exchange [--quick]
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo, open_checkpoint, save_checkpoint
from shardwright.checkpoint.exchange.passing import Together
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from shardwright.engine_torch.io.exchange import RankCarrier

RANKS, TENSORS, ROWS = 4, 16, 1024
POINT = RunPoint(step=1, seed=0, data_position=0, model="bench", layout_name="", layout_text="", mesh={})
LOADS = ("same", "columns", "replicas")
NOTES = (
    "Saved in blocks of rows by four ranks; loaded in the same blocks, in blocks of columns, or in full on every rank. Gloo, on one "
    "machine; the page cache is warm, so that times are those of copies, digests and messages, and not of a disk.",
    "Bytes read are those of all ranks, over the bytes of the tensors. Memory: the largest resident size of a rank above that before "
    "the load, over what the rank has loaded; the slowest and the largest of all ranks are shown.",
)


def boxes_of(load: str, columns: int, rank: int) -> list[Box]:
    match load:
        case "same":
            step = ROWS // RANKS
            return [Box((rank * step, 0), ((rank + 1) * step, columns))]
        case "columns":
            step = columns // RANKS
            return [Box((0, rank * step), (ROWS, (rank + 1) * step))]
        case _:
            return [Box((0, 0), (ROWS, columns))]


def save(folder: Path, columns: int) -> Path:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((ROWS, columns), np.float32)
    infos = [TensorInfo(name=f"w{number}", shape=array.shape, dtype="float32") for number in range(TENSORS)]
    # Blocks of rows of one process would be stored as one box: other tensors lie between them.
    owned = [
        OwnedBox(name=info.name, box=box, array=array[box.slices])
        for rank in range(RANKS)
        for info in infos
        for box in boxes_of("same", columns, rank)
    ]
    found = save_checkpoint(folder, POINT, infos, owned)
    assert isinstance(found, Path)
    return found


def status(key: str) -> int:
    """A number of bytes of this process, by its name in ``/proc/self/status``."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def rank_of(rank: int, store: str, directory: str, load: str, together: bool, answers: Any) -> None:
    """One rank loads, and puts its seconds, bytes read, growth of memory and bytes loaded into the queue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    checkpoint = open_checkpoint(directory, all_files=False)
    columns = checkpoint.tensor("w0").shape[1]
    wants = wants_of((other, box) for other in range(RANKS) for box in boxes_of(load, columns, other))
    carrier = RankCarrier(device=torch.device("cpu"))
    # Before the measurement: connections, and the code of the first collective.
    dist.all_to_all_single(torch.zeros(RANKS), torch.zeros(RANKS))
    carrier.largest(0)
    source = Together(source=checkpoint, wants=lambda _: wants, carrier=carrier) if together else checkpoint
    dist.barrier()
    before, read, started = status("VmRSS"), bytes_read(), time.perf_counter()
    found = [array for name in checkpoint.tensors for array in source.read_boxes(name, boxes_of(load, columns, rank))]
    dist.barrier()
    took = time.perf_counter() - started
    answers.put((took, bytes_read() - read, status("VmHWM") - before, sum(array.nbytes for array in found)))
    dist.barrier()
    dist.destroy_process_group()


def measured(directory: Path, load: str, together: bool) -> tuple[float, float, float]:
    """Seconds, bytes read over the bytes of the tensors, and memory over what was loaded."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", str(directory), load, together, answers)
        ranks = [context.Process(target=rank_of, args=(rank, *given)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        found = [answers.get(timeout=600) for _ in ranks]
        for rank in ranks:
            rank.join()
    total = sum(np.prod(info.shape) * 4 for info in open_checkpoint(directory).tensors.values())
    return (
        max(took for took, *_ in found),
        sum(read for _, read, *_ in found) / float(total),
        max(grown / loaded for *_, grown, loaded in found),
    )


def main() -> None:
    """Measure every load, together and alone."""
    options = begin(__doc__, devices=1)
    num_bytes = (64 if options.quick else 512) << 20
    columns = num_bytes // TENSORS // ROWS // 4
    folder = Path(tempfile.mkdtemp())
    rows: list[list[str]] = []
    numbers: dict[str, dict[str, float]] = {}
    try:
        directory = save(folder, columns)
        for load in LOADS:
            for together in (True, False):
                took, read, memory = measured(directory, load, together)
                how = "together" if together else "each for itself"
                rows.append([load, how, f"{took:.2f} s", f"{read:.2f}", f"{memory:.2f}"])
                numbers[f"{load}, {how}"] = {"seconds": took, "bytes read": read, "memory": memory}
                print("  ".join(rows[-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    most = max(one["memory"] for name, one in numbers.items() if "together" in name)
    keep(
        Found(
            name="checkpoint_exchange",
            title=f"Loads of {num_bytes >> 20} MiB by {RANKS} ranks",
            columns=["load", "how", "time", "bytes read", "memory"],
            rows=rows,
            headline=f"together: replicas read {numbers['replicas, together']['bytes read']:.2f} times the tensors, memory {most:.2f} at most",
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()

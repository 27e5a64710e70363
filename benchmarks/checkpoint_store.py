"""Saves and loads in an object store, by one process, against the requests alone: a real S3 server on this machine.

python -m benchmarks.checkpoint_store [--quick]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import fsspec

from benchmarks.checkpoint import POINT, arrays_of, in_rows, infos_of, timed
from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.checkpoint import open_checkpoint, save_checkpoint
from shardwright.storage.objects import PARALLEL_REQUESTS, PART_BYTES, REQUEST_BYTES
from shardwright.storage.store import StoreFiles
from tests.storage.s3 import BUCKET, serving

NOTES = (
    "The server is moto, in a process of its own; it keeps objects in memory, and its time is in every number.",
    "Raw: boto3 uploads the bytes of all tensors as one object in the same parts, and gets its ranges; each with as many requests at a "
    "time. One upload at a time: a save, and raw, that do not divide what they write.",
    "Memory: the largest resident size of a process above that before its save or load, over the state.",
)

MEMORY = """
import sys
from benchmarks.checkpoint import POINT, arrays_of, in_rows, infos_of
from shardwright.checkpoint import describe, open_checkpoint, save_checkpoint
what, out, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
if what == "save":
    arrays = arrays_of(num_bytes)
    # The client is imported, and has asked once.
    small = {"w": arrays["w0"][:, :8]}
    save_checkpoint(f"{out}-small", POINT, infos_of(small), in_rows(small))
    before = peak()
    save_checkpoint(out, POINT, infos_of(arrays), in_rows(arrays))
else:
    checkpoint = open_checkpoint(out)
    before = peak()
    found = [checkpoint.read_box(name) for name in checkpoint.tensors]
print((peak() - before) / num_bytes)
"""


class Raw:
    """All bytes as one object."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        import boto3

        self.client: Any = boto3.client("s3")
        self.data = b"".join(array.tobytes() for array in arrays.values())

    def save(self, name: str, uploads: int = StoreFiles.parallel) -> None:
        made = self.client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]

        def put(number: int) -> dict[str, Any]:
            body = self.data[(number - 1) * PART_BYTES : number * PART_BYTES]
            sent = self.client.upload_part(Bucket=BUCKET, Key=name, UploadId=made, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        with ThreadPoolExecutor(uploads) as threads:
            parts = list(threads.map(put, range(1, -(-len(self.data) // PART_BYTES) + 1)))
        self.client.complete_multipart_upload(Bucket=BUCKET, Key=name, UploadId=made, MultipartUpload={"Parts": parts})

    def load(self, name: str) -> None:
        def get(start: int) -> int:
            stop = min(start + REQUEST_BYTES, len(self.data))
            found = self.client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={start}-{stop - 1}")
            return len(found["Body"].read())

        with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
            assert sum(threads.map(get, range(0, len(self.data), REQUEST_BYTES))) == len(self.data)


ROUNDS = ("raw save", "save", "raw save, one upload", "save, one upload", "raw load", "load")


def save_one_by_one(arrays: dict[str, Any], out: str) -> None:
    with patch.object(StoreFiles, "parallel", 1):
        save_checkpoint(out, POINT, infos_of(arrays), in_rows(arrays))


def memory(what: str, out: str, num_bytes: int) -> float:
    command = [sys.executable, "-c", MEMORY, what, out, str(num_bytes)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Time both, one after the other in each round."""
    options = begin(__doc__, devices=1)
    num_bytes = (1 << 26) if options.quick else (1 << 28)
    arrays = arrays_of(num_bytes)
    times: dict[str, list[float]] = {name: [] for name in ROUNDS}

    with serving():
        raw = Raw(arrays)
        for number in range(options.blocks(5) + 1):
            out = f"s3://{BUCKET}/ours-{number}"
            step = f"{out}/checkpoints/step-00000001"

            def load(step: str = step) -> None:
                checkpoint = open_checkpoint(step)
                for name in arrays:
                    checkpoint.read_box(name)

            rounds: dict[str, Callable[[], Any]] = {
                "raw save": lambda number=number: raw.save(f"raw-{number}"),
                "save": lambda out=out: save_checkpoint(out, POINT, infos_of(arrays), in_rows(arrays)),
                "raw save, one upload": lambda number=number: raw.save(f"raw-{number}", 1),
                "save, one upload": lambda out=out: save_one_by_one(arrays, f"{out}-one"),
                "raw load": lambda number=number: raw.load(f"raw-{number}"),
                "load": load,
            }
            for name, do in rounds.items():
                took = timed(do)
                if number:  # The first round warms up.
                    times[name].append(took)
            # The server has all of it in memory.
            fsspec.filesystem("s3").rm(
                [f"{BUCKET}/{name}-{number}{end}" for name, end in (("ours", ""), ("ours", "-one"), ("raw", ""))],
                recursive=True,
            )
        of_save = memory("save", f"s3://{BUCKET}/memory", num_bytes)
        of_load = memory("load", f"s3://{BUCKET}/memory/checkpoints/step-00000001", num_bytes)
    rows: list[list[str]] = []
    for what, most in (("save", f"{of_save:.2f}"), ("save, one upload", ""), ("load", f"{of_load:.2f}")):
        ratio = statistics.median(one / other for one, other in zip(times[what], times[f"raw {what}"], strict=True))
        seconds = [f"{num_bytes / 1e6 / statistics.median(times[name]):.0f} MB/s" for name in (f"raw {what}", what)]
        rows.append([what, *seconds, f"{ratio:.2f}", most])
    keep(
        Found(
            name="checkpoint_store",
            title=f"Save and load of {num_bytes >> 20:,} MiB by one process in S3 on this machine",
            columns=["what", "raw", "ours", "time over raw", "memory over state"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[3]} of raw" for row in rows),
            notes=NOTES,
            numbers={"seconds": times, "memory": {"save": of_save, "load": of_load}},
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()

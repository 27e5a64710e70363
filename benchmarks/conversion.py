"""Imports and exports of folders of torch.distributed.checkpoint and Orbax, against a raw copy of the same bytes.

python -m benchmarks.conversion [--quick]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.checkpoint import Dcp, Orbax, arrays_of, timed
from benchmarks.options import begin
from benchmarks.results import Found, keep

DEVICES = 8
CONVERSIONS = {
    "import dcp": ("engine_torch.dcp_folder", "import_folder", "dcp-1"),
    "export dcp": ("engine_torch.dcp_folder", "export_folder", "ours"),
    "import orbax": ("engine_jax.orbax_folder", "import_folder", "orbax-1"),
    "export orbax": ("engine_jax.orbax_folder", "export_folder", "ours"),
}
"""The module, the function and the source of each."""
NOTES = (
    "Random float32 in tensors of 64 MiB. Each round does all, in an order that is reversed from round to round, and syncs what it "
    "has written; ratios are of one round, their median is shown. The source is in the page cache.",
    "Memory: the largest resident size above that after the imports of the libraries, in a process of its own.",
)
PROGRAM = """
import importlib, sys
from pathlib import Path
module, function, source, to = sys.argv[1:]
convert = getattr(importlib.import_module("shardwright." + module), function)
if "orbax" in module:
    import orbax.checkpoint, tensorstore
import ml_dtypes
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
convert(Path(source), Path(to))
print(peak() - before)
"""


def copied(source: Path, to: Path) -> None:
    """Copy the files of a folder, and make the copies durable."""
    for path in source.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as read, target.open("wb") as write:
                shutil.copyfileobj(read, write, 8 << 20)
                write.flush()
                os.fsync(write.fileno())


def memory_of(what: str, folder: Path) -> int:
    module, function, source = CONVERSIONS[what]
    to = folder / "memory"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, function, str(folder / source), str(to)],
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(to)
    return int(ended.stdout.split()[-1])


def main() -> None:
    """Time all conversions."""
    options = begin(__doc__, devices=DEVICES)
    from importlib import import_module

    num_bytes = (1 << 28) if options.quick else (1 << 30)
    arrays = arrays_of(num_bytes)
    folder = Path(tempfile.mkdtemp(dir=".")).absolute()
    times: dict[str, list[float]] = {name: [] for name in ("copy", *CONVERSIONS)}
    try:
        Dcp(arrays).save(folder / "dcp-1")
        Orbax(arrays).save(folder / "orbax-1")
        import_module("shardwright.engine_torch.dcp_folder").import_folder(folder / "dcp-1", folder / "ours")
        for number in range(options.blocks(3) + 1):
            for name in list(times) if number % 2 else list(times)[::-1]:
                to = folder / "to"
                if name == "copy":
                    seconds = timed(lambda to=to: copied(folder / "ours", to))
                else:
                    module, function, source = CONVERSIONS[name]
                    convert = getattr(import_module(f"shardwright.{module}"), function)
                    seconds = timed(lambda convert=convert, source=source, to=to: convert(folder / source, to))
                shutil.rmtree(to)
                if number:  # The first round warms up.
                    times[name].append(seconds)
        memory = {name: memory_of(name, folder) for name in CONVERSIONS}
    finally:
        shutil.rmtree(folder)
    gib = num_bytes / (1 << 30)
    rows, numbers = [], []
    for name, seconds in times.items():
        ratio = statistics.median(one / raw for one, raw in zip(seconds, times["copy"], strict=True))
        shown = f"{memory[name] >> 20:,} MiB" if name in memory else "-"
        rows.append([name, f"{statistics.median(seconds) / gib:.2f} s", f"{ratio:.2f}", shown])
        numbers.append({"what": name, "seconds": seconds, "over_copy": ratio, "memory": memory.get(name)})
    keep(
        Found(
            name="conversion",
            title=f"Conversion of a folder of {num_bytes >> 20:,} MiB",
            columns=["what", "time of a GiB", "over a raw copy", "memory"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[2]}" for row in rows[1:]),
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()

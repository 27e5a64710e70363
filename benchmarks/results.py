"""The results of a benchmark: printed, and saved with the machine, the date and the command.

``results/NAME.json`` and ``results/NAME.md`` are of the last run; ``results/history.md`` has a line for every run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
LIBRARIES = ("jax", "jaxlib", "torch", "numpy", "optax")
HISTORY = "# Every run of a benchmark\n\n| date (UTC) | commit | benchmark | found | machine |\n|---|---|---|---|---|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a measurement. ``load_before`` and ``load_after``: load average over a minute."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    libraries: Mapping[str, str]
    load_before: float
    load_after: float
    accelerator: str = ""

    def __str__(self) -> str:
        what = f"{self.accelerator}, " if self.accelerator else ""
        return f"{what}{self.cpu}, {self.cores} cores, load {self.load_before:.1f} to {self.load_after:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A table of measurements. ``rows`` are text; ``numbers`` are all values behind them, for programs."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    headline: str
    notes: Sequence[str] = ()
    numbers: Any = None


def load() -> float:
    """Load average over the last minute."""
    return os.getloadavg()[0]


def keep(found: Found, load_before: float, accelerator: str = "") -> None:
    """Print the table and write the files."""
    machine = Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        libraries={name: metadata.version(name) for name in LIBRARIES},
        load_before=load_before,
        load_after=load(),
        accelerator=accelerator,
    )
    module = (sys.modules["__main__"].__spec__ or sys.modules["__main__"]).name  # type: ignore[union-attr]
    command = " ".join(["python", "-m", module, *sys.argv[1:]])
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    commit = _commit()
    print(f"\n{found.title}\n{_aligned(found.columns, found.rows)}")
    for note in found.notes:
        print(note)
    FOLDER.mkdir(exist_ok=True)
    about = {"date": now, "commit": commit, "command": command, "machine": asdict(machine)}
    numbers = {"name": found.name, "headline": found.headline, **about, "numbers": found.numbers}
    (FOLDER / f"{found.name}.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    libraries = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    text = [
        f"# {found.title}",
        "",
        f"`{command}`, {now} UTC, commit {commit}, on {machine}; Python {machine.python}, {libraries}.",
        "",
        _table(found.columns, found.rows),
        *(f"\n{note}" for note in found.notes),
    ]
    (FOLDER / f"{found.name}.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    history = FOLDER / "history.md"
    before = history.read_text(encoding="utf-8") if history.exists() else HISTORY
    line = f"| {now} | {commit} | {found.name} | {found.headline} | {machine} |\n"
    history.write_text(before + line, encoding="utf-8")


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    first, *rest = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], rest, strict=True))])
        for row in cells
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=FOLDER.parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

"""Kills processes that save, synchronously and in the background, alone and three together, and prints where the kills were.

python -m tests.runs.kills [--kills 500] [--seed 0] [--jobs 2]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tests.conftest import ROOT

PROGRAMS = {
    ("synchronous", 1): ("tests.checkpoint.killing", "--writers"),
    ("synchronous", 3): ("tests.checkpoint.killing", "--writers"),
    ("asynchronous", 1): ("tests.runs.killing", "--processes"),
    ("asynchronous", 3): ("tests.runs.killing", "--processes"),
}
PHASES = {
    "writing": "while boxes were written",
    "before the rename": "after the manifest, before the rename",
    "before deleting an old one": "after the rename",
    "deleting an old one": "while an older step was deleted",
    "elsewhere": "at another moment",
    "ended by SIGTERM": "SIGTERM instead",
}


def killed(saves: str, processes: int, kills: int, seed: int) -> tuple[str, bool]:
    """A row of the table, and whether every kill left a valid folder."""
    program, option = PROGRAMS[saves, processes]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", program, folder, option, str(processes), "--kills", str(kills)]
        ended = subprocess.run([*command, "--seed", str(seed)], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        return f"{saves}, {processes}: {ended.stderr}", False
    found = {what: int(count) for count, what in re.findall(r"(\d+) ([A-Za-z ]+)", ended.stdout.splitlines()[0])}
    cells = " | ".join(str(found.get(phase, 0)) for phase in PHASES)
    return f"| {saves} | {processes} | {sum(found.get(phase, 0) for phase in PHASES)} | {cells} |", True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    each = -(-given.kills // len(PROGRAMS))
    print(f"seed {given.seed}\n| saves | processes | kills | {' | '.join(PHASES.values())} |")
    print(f"|---|---:|---:|{'---:|' * len(PHASES)}")
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda case: killed(case[0], case[1], each, given.seed), PROGRAMS))
    for row, _ in rows:
        print(row)
    return 0 if all(valid for _, valid in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Flips random bits of a checkpoint, one at a time, and truncates files: each is found, and the step before is untouched.

    python -m tests.checkpoint.flipping [--flips 4000] [--truncations 200] [--seed 0]

Prints where the bits were, and when they were found.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardwright.checkpoint import Checkpoint, DamagedError, latest, open_checkpoint, saving, verify
from shardwright.checkpoint.writing.save import commit, join_save, write_part
from tests.checkpoint.editing import MANIFEST
from tests.checkpoint.killing import state_of
from tests.checkpoint.states import point, same_bits

EARLIER, NEWEST = 5, 10
WRITERS = 3
FILE_BYTES, PIECE_BYTES = 1 << 15, 1 << 12
FOUND = ("opening", "reading", "no effect")
"""When a flipped bit is found. It has no effect in white space between the fields of the manifest."""


def saved_by_several(out: Path, step: int) -> Path:
    """A checkpoint of several processes, each with several files."""
    state = state_of(step)
    with saving(out, step) as first:
        for process in range(WRITERS):
            save = first if process == 0 else join_save(out, step, first.name)
            owned = state.owned[process::WRITERS]
            write_part(save, state.infos, owned, process=process, max_file_bytes=FILE_BYTES, piece_bytes=PIECE_BYTES)
        return commit(first, point(step), num_processes=WRITERS)


def kind_of(path: Path) -> str:
    """The kind of a file of a checkpoint, without the number of its process."""
    return re.sub(r"-[0-9-]+", "", path.name)


def found_when(out: Path, damaged: Path) -> str:
    """One of ``FOUND``. Asserts that the damage to a file of the newest step is found, and hides no other step."""
    checked = verify(out)
    newest, earlier = checked["checkpoints"]
    assert earlier["ok"]
    assert earlier["step"] == EARLIER
    if newest["ok"]:
        assert damaged.name == MANIFEST
        assert_whole(open_checkpoint(damaged.parent))
        return "no effect"
    assert any(str(damaged) in problem["message"] for problem in newest["problems"]), (damaged, newest["problems"])
    found = latest(out).checkpoint
    assert found is not None
    if found.point.step == EARLIER:
        return "opening"
    errors: list[str] = []
    for name, array in state_of(NEWEST).arrays.items():
        try:
            assert same_bits(found.read_box(name), array), name
        except DamagedError as error:
            errors.append(str(error))
    assert [str(damaged) in error for error in errors] == [True], errors
    return "reading"


def assert_whole(checkpoint: Checkpoint) -> None:
    for name, array in state_of(checkpoint.point.step).arrays.items():
        assert same_bits(checkpoint.read_box(name), array), name


def damage(draw: random.Random, data: bytes, *, truncate: bool) -> bytes:
    place = draw.randrange(len(data))
    if truncate:
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def flipped(out: Path, draw: random.Random, flips: int, truncations: int = 0) -> Counter[tuple[str, str, str]]:
    """How many of each: (what was done, to which kind of file, when it was found)."""
    earlier, newest = saved_by_several(out, EARLIER), saved_by_several(out, NEWEST)
    before = {path: path.read_bytes() for path in earlier.iterdir()}
    files = sorted(newest.iterdir())
    counts: Counter[tuple[str, str, str]] = Counter()
    for number in range(flips + truncations):
        path, truncate = draw.choice(files), number >= flips
        good = path.read_bytes()
        path.write_bytes(damage(draw, good, truncate=truncate))
        counts["truncated" if truncate else "flipped", kind_of(path), found_when(out, path)] += 1
        path.write_bytes(good)
    assert {path: path.read_bytes() for path in earlier.iterdir()} == before
    assert verify(out)["ok"]
    return counts


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """One line for each kind of file."""
    lines = ["| | file | " + " | ".join(f"found on {when}" if when != "no effect" else when for when in FOUND) + " |"]
    lines.append("|---|---|" + "---:|" * len(FOUND))
    rows: Sequence[tuple[str, str]] = sorted({(done, kind) for done, kind, _ in counts})
    for done, kind in rows:
        lines.append(f"| {done} | {kind} | " + " | ".join(str(counts[done, kind, when]) for when in FOUND) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=4000)
    parser.add_argument("--truncations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(table(flipped(Path(folder), random.Random(given.seed), given.flips, given.truncations)))


if __name__ == "__main__":
    main()

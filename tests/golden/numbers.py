"""Checks that golden texts have changed only in words: every number of each file occurs as often as at another commit.

    python -m tests.golden.numbers COMMIT [PATH ...]

Without a path: all of tests/golden. A line of our own source in a text (``links.py:120``) is no number. Files that were
renamed are compared with their former versions; new and removed files are listed. Exit code 1 if a number differs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
OF_SOURCE = re.compile(r"[\w/]+\.py:\d+(:\d+)?")


def numbers_of(text: str) -> Counter[str]:
    """Each number of a text, and how often it occurs.

    >>> sorted(numbers_of("128 KiB of 1,024 at links.py:120, 4.5e-07 apart, 128 in all").items())
    [('1,024', 1), ('128', 2), ('4.5e-07', 1)]
    """
    return Counter(NUMBER.findall(OF_SOURCE.sub("", text)))


def differences(before: str, after: str) -> str:
    """The numbers removed from a text and those added to it; empty if there are none.

    >>> differences("8 slices of 4 KiB", "8 shards of 5 KiB")
    'no longer 4; now 5'
    >>> differences("unreduced over fsdp 8", "partial over fsdp 8")
    ''
    """
    old, new = numbers_of(before), numbers_of(after)
    lost, got = sorted((old - new).elements()), sorted((new - old).elements())
    changes = [("no longer ", lost), ("now ", got)]
    return "; ".join(f"{word}{', '.join(numbers)}" for word, numbers in changes if numbers)


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    commit, *paths = arguments
    wrong = compared = 0
    for old, new in _pairs(commit, paths or ["tests/golden"]):
        if old is None or new is None:
            print(f"{'new ' if old is None else 'gone'}  {new or old}")
            continue
        compared += 1
        changes = differences(_git("show", f"{commit}:{old}"), (ROOT / new).read_text(encoding="utf-8"))
        if changes:
            wrong += 1
            print(f"{new}: {changes}")
    print(f"{compared} files have changed in words since {commit[:12]}, {wrong} of them in numbers")
    return 1 if wrong else 0


def _pairs(commit: str, paths: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """The former and the present path of each changed text."""
    for line in _git("diff", "--name-status", "-M15%", commit, "--", *paths).splitlines():
        kind, *names = line.split("\t")
        if Path(names[-1]).suffix == ".py":
            continue
        yield (None, names[0]) if kind == "A" else (names[0], None) if kind == "D" else (names[0], names[-1])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

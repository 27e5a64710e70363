"""Mutation tests: small faults, drawn by a seed and put into a copy of the sources one at a time. Does a test detect each?

    python -m tests.mutants [--count 300] [--seed 0] [--jobs 2] [--only src/shardwright/core]

First the lines that each test runs are recorded, in a folder that is kept (`--kept`). Then each fault runs against the tests
that run its statement, one of each file first and the quickest first, until one fails. A fault that no test detects survives:
`survivors.toml` gives a reason for it, or the command ends with 1. An interrupted command resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import Fault, Slip, fault_of, slips_of
from tests.mutants.forks import ROOT, SOURCES, Running, end_group, finished, pytest_of, start, warm_up
from tests.mutants.lines import Recorder, Traced, read_map, write_map

AREAS = ("core", "locks", "training", "cost", "checkpoint", "data", "engine_jax", "engine_torch")
NOT_USED = (
    "tests/benchmarks",
    "tests/laws/test_documents",
    "tests/laws/test_layers",
    "tests/laws/test_setup",
    "tests/laws/test_sources",
    "tests/mutants",
    "tests/targets",
)
"""Tests of texts and of other programs, which cannot detect a fault in the code, or take too long."""

IN_OTHER_PROCESSES = {
    "engine_torch": ("tests/engine_torch/test_redistribute.py", "tests/engine_torch/test_layouts_agree.py")
}
"""Tests whose lines run on ranks, where they are not recorded: run for every fault of that area, after the others."""

SURVIVORS = Path(__file__).parent / "survivors.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``by``: the tests that ran the fault and did not detect it, or how it was detected."""

    fault: Fault
    detected: bool
    by: str


def main() -> int:
    given = _arguments()
    # SIGTERM also ends the forks, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    environment = warm_up(os.environ)
    kept = Path(given.kept).resolve()
    tests = _traced(kept / "lines", given, environment)
    drawn = drawn_from([Path(one) for one in given.only], given.count, given.seed)
    state = kept / f"seed-{given.seed}.jsonl"
    verdicts = _judged(drawn, tests, state, given, environment)
    reasons = _reasons()
    for file, function, old, _ in stale(reasons):
        print(f"no longer in the code: remove it from {SURVIVORS.name}: {file} {function}: {old}")
    return report(verdicts, reasons)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[f"src/shardwright/{area}" for area in AREAS])
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders or files of tests to run")
    parser.add_argument(
        "--seconds", type=float, default=300, help="of tests to run for one fault, by their time without a fault"
    )
    parser.add_argument("--kept", default=".pytest_cache/mutants", help="the folder for recorded lines and verdicts")
    return parser.parse_args()


def _files_of_tests(folders: Sequence[str]) -> list[str]:
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("test_*.py")))
    ]
    return [file for file in found if not file.startswith(NOT_USED)]


def _traced(folder: Path, given: argparse.Namespace, environment: Mapping[str, str]) -> list[Traced]:
    """Every test with the lines that it runs."""
    files = _files_of_tests(given.tests)
    todo = [file for file in files if read_map(folder, file) is None]
    print(f"{len(files)} test files; the lines of {len(todo)} of them are recorded first")
    sources = SOURCES.parent

    def work(file: str) -> int:
        recorder = Recorder(sources)
        code = pytest_of([file], recorder, to_the_end=True)
        if code in (0, 1) and recorder.passed:
            write_map(folder, file, recorder.passed)
        for name in recorder.failed:
            print(f"not used: {name}")
        return code

    with tempfile.TemporaryDirectory() as scratch:
        logs = {file: Path(scratch) / f"{number}.log" for number, file in enumerate(todo)}
        jobs = [
            (file, lambda file=file: start(environment, sources, logs[file], 1800, lambda: work(file))) for file in todo
        ]
        for file, code in _side_by_side(jobs, given.jobs, {0: "recorded", 1: "recorded, without the tests that fail"}):
            if code not in (0, 5):
                print(
                    f"tests that fail or time out without a fault are not used:\n{logs[file].read_text(encoding='utf-8')[-600:]}"
                )
    return [test for file in files for test in read_map(folder, file) or ()]


def _side_by_side(
    jobs: Sequence[tuple[str, Callable[[], Running]]], most: int, words: Mapping[int, str]
) -> Iterator[tuple[str, int | None]]:
    """Each job's name and exit code as it ends, None for a timeout; ``words``: the meaning of codes 0 and 1."""
    running: dict[int, tuple[str, Running]] = {}
    pending, done, started = list(reversed(jobs)), 0, time.monotonic()
    try:
        while pending or running:
            while pending and len(running) < most:
                name, begin = pending.pop()
                one = begin()
                running[one.pid] = (name, one)
            ended = finished([one for _, one in running.values()])
            if ended is None:
                time.sleep(0.02)
                continue
            one, code = ended
            name, _ = running.pop(one.pid)
            done += 1
            left = (time.monotonic() - started) / done * (len(jobs) - done)
            ended_as = words.get(code, words[1]) if code is not None else "timed out"
            print(f"[{done}/{len(jobs)}, {left / 60:.0f} min left] {name}: {ended_as}", flush=True)
            yield name, code
    finally:
        for _, one in running.values():
            end_group(one)


def drawn_from(folders: Sequence[Path], count: int, seed: int) -> list[Fault]:
    """Faults of the folders: as many for each folder, and in it for each kind, as far as there are enough."""
    dice = random.Random(seed)
    by_folder: list[dict[str, list[Slip]]] = []
    for folder in folders:
        inside = ROOT / folder
        paths = [inside] if inside.is_file() else sorted(inside.rglob("*.py"))
        by_kind: dict[str, list[Slip]] = {}
        for slip in (slip for path in paths for slip in slips_of(path)):
            by_kind.setdefault(slip.kind, []).append(slip)
        by_folder.append({kind: dice.sample(slips, len(slips)) for kind, slips in sorted(by_kind.items())})
    drawn: dict[tuple[str, ...], Fault] = {}
    while len(drawn) < count and any(by_folder):
        for by_kind in by_folder:
            if not by_kind or len(drawn) == count:
                continue
            kind = dice.choice(list(by_kind))
            fault = fault_of(by_kind[kind].pop(), SOURCES)
            if not by_kind[kind]:
                del by_kind[kind]
            if fault is not None:
                drawn.setdefault(fault.key, fault)
    return list(drawn.values())


def ranked_tests(fault: Fault, tests: Sequence[Traced], seconds: float) -> list[Traced]:
    """The tests that run the statement of a fault: the quickest ones of each file before the others of any."""
    first, last = fault.lines
    lines = frozenset(range(first, last + 1))
    running = sorted((t for t in tests if lines & t.lines.get(fault.file, frozenset())), key=lambda test: test.seconds)
    of_file: Counter[str] = Counter()
    ranked: list[tuple[int, float, Traced]] = []
    for test in running:
        file = test.name.partition("::")[0]
        ranked.append((of_file[file] // 4, test.seconds, test))
        of_file[file] += 1
    chosen, total = [], 0.0
    for _, took, test in sorted(ranked, key=lambda one: one[:2]):
        if chosen and total + took > seconds:
            break
        chosen.append(test)
        total += took
    return chosen


def _judged(
    drawn: Sequence[Fault],
    tests: Sequence[Traced],
    state: Path,
    given: argparse.Namespace,
    environment: Mapping[str, str],
) -> list[Verdict]:
    state.parent.mkdir(parents=True, exist_ok=True)
    known = _known(state)
    found: dict[tuple[str, ...], Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        jobs, faults, logs = [], {}, {}
        for number, fault in enumerate(drawn):
            chosen = ranked_tests(fault, tests, given.seconds)
            names = [*(test.name for test in chosen), *IN_OTHER_PROCESSES.get(fault.file.partition("/")[0], ())]
            before = known.get(fault.key)
            # A detected fault stays detected; a survivor may be detected by a new test.
            if before is not None and (before.detected or before.by == _tests_text(names)):
                found[fault.key] = Verdict(fault=fault, detected=before.detected, by=before.by)
                continue
            if not names:
                found[fault.key] = Verdict(fault=fault, detected=False, by=_tests_text(names))
                continue
            label = f"{number} {fault.file} {fault.function}, {fault.kind}"
            faults[label], logs[label] = (fault, names), Path(scratch) / f"{number}.log"
            limit_s = 60 + 8 * sum(test.seconds for test in chosen) + (300 if len(names) > len(chosen) else 0)
            jobs.append(
                (label, _with_fault(fault, names, Path(scratch) / str(number), logs[label], limit_s, environment))
            )
        with state.open("a", encoding="utf-8") as lines:
            for label, code in _side_by_side(jobs, given.jobs, {0: "SURVIVED", 1: "detected"}):
                fault, names = faults[label]
                shutil.rmtree(Path(scratch) / label.partition(" ")[0], ignore_errors=True)
                verdict = Verdict(
                    fault=fault,
                    detected=code != 0,
                    by=_tests_text(names) if code == 0 else "fails" if code else "timed out",
                )
                found[fault.key] = verdict
                lines.write(json.dumps([*fault.key, verdict.detected, verdict.by]) + "\n")
                lines.flush()
    return [found[fault.key] for fault in drawn]


def _tests_text(names: Sequence[str]) -> str:
    if not names:
        return "no test runs it"
    return f"{len(names)} tests run it: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _with_fault(
    fault: Fault, names: Sequence[str], scratch: Path, log: Path, limit_s: float, environment: Mapping[str, str]
) -> Callable[[], Running]:
    def begin() -> Running:
        shutil.copytree(SOURCES, scratch / "shardwright", ignore=shutil.ignore_patterns("__pycache__"))
        (scratch / "shardwright" / fault.file).write_text(fault.text, encoding="utf-8")
        return start(environment, scratch, log, limit_s, lambda: pytest_of(names))

    return begin


def _known(state: Path) -> dict[tuple[str, ...], Verdict]:
    if not state.exists():
        return {}
    found = {}
    for line in state.read_text(encoding="utf-8").splitlines():
        *key, detected, by = json.loads(line)
        fault = Fault(file=key[0], function=key[1], kind="", lines=(0, 0), old=key[2], new=key[3], text="")
        found[tuple(key)] = Verdict(fault=fault, detected=detected, by=by)
    return found


def _reasons() -> dict[tuple[str, ...], str]:
    """Why a fault need not be detected, by its key."""
    listed = tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).get("survivor", [])
    return {(one["file"], one["function"], one["old"], one["new"]): one["reason"].strip() for one in listed}


def stale(reasons: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Listed survivors whose statement is no longer in its file."""

    def words(file: str) -> str:
        path = SOURCES / file
        return " ".join(path.read_text(encoding="utf-8").split()) if path.exists() else ""

    return [key for key in reasons if key[2] not in words(key[0])]


def report(verdicts: Sequence[Verdict], reasons: Mapping[tuple[str, ...], str]) -> int:
    """Prints the table, and every survivor without a reason. Returns the exit code."""
    rows: dict[str, Counter[str]] = {}
    unexplained = []
    for one in verdicts:
        row = rows.setdefault(one.fault.file.partition("/")[0], Counter())
        row["drawn"] += 1
        if one.detected:
            row["detected"] += 1
        elif reasons.get(one.fault.key):
            row["with a reason"] += 1
        else:
            row["without"] += 1
            unexplained.append(one)
    columns = ("drawn", "detected", "with a reason", "without")
    print("\n| | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|")
    for area, row in [*rows.items(), ("all", sum(rows.values(), Counter()))]:
        print(f"| {area} | " + " | ".join(str(row[column]) for column in columns) + " |")
    for one in unexplained:
        fault = one.fault
        print(f"\nsrc/shardwright/{fault.file}:{fault.lines[0]} {fault.function} ({fault.kind}); {one.by}")
        print(f"  - {fault.old}\n  + {fault.new}")
    if unexplained:
        print(f"\n{len(unexplained)} faults that no test detects: write a test, or give a reason in {SURVIVORS.name}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())

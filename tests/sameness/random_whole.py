"""Trains random layouts, compares them with one device, and writes their section of docs/sameness.md.

    python -m tests.sameness.random_whole [--dtype bfloat16] [--seed 7] [--count 1000] [--jobs 2] [--kept FILE]

Without ``--seed`` a seed is drawn and printed. Layouts are trained alternately on JAX, on up to 16 simulated devices, and on up
to 8 ranks of PyTorch. With ``--kept`` each result is added to a file, and layouts that are in the file are not trained again.
``--only NUMBER`` trains one of them. The page is written if there were 1,000 layouts and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from math import inf
from multiprocessing import get_context
from pathlib import Path

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import Difference
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.sameness.page import PAGE, with_section
from tests.sameness.random_layouts import DTYPES, Drawn, draw
from tests.sameness.random_page import TITLES, Result, section
from tests.sameness.random_runs import AgainstOneDevice, Apart, on_jax, on_ranks

COUNT = 1000
NOT_KNOWN = Apart(Difference(loss=inf, gradient=inf, weight=""))
LIMIT_S = 900.0
"""How long the ranks of a layout may take. It is long, because one timeout ends a run of a thousand layouts."""

MOST = {"jax": 16, "torch": 8}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kept", type=Path, default=None)
    parser.add_argument("--only", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    numbers = range(options.count) if options.only is None else [options.only]
    found = {one.number: one for one in kept(options.kept, seed, options.dtype) if one.number in numbers}
    start, left = time.monotonic(), [number for number in numbers if number not in found]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), initializer=begin) as pool:
        futures = [pool.submit(trained, seed, number, options.dtype) for number in left]
        for done in as_completed(futures):
            one = found[done.result().number] = done.result()
            if options.kept is not None:
                with options.kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": seed, "dtype": options.dtype, **asdict(one)}) + "\n")
            print(f"{time.monotonic() - start:6.0f} s {len(found):4d}/{len(numbers)} {line(one)}", flush=True)
    results = [found[number] for number in numbers]
    wrong = [one for one in results if one.wrong]
    text = section(results, seed, options.dtype)
    print(text)
    for one in wrong:
        print(f"not the same: {line(one)}", file=sys.stderr)
    if not wrong and len(results) >= COUNT:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLES[options.dtype], text), encoding="utf-8")
    return 1 if wrong else 0


def kept(path: Path | None, seed: int, dtype: str) -> list[Result]:
    """The results of an earlier run with the same seed and dtype."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    rows = [row for row in map(json.loads, lines) if (row.pop("seed"), row.pop("dtype")) == (seed, dtype)]
    return [Result(**row) for row in rows if not row["wrong"]]


def begin() -> None:
    """Prepare a process of the pool: more simulated devices than the tests have, and ranks."""
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={MOST['jax']}"
    global _against
    _against = AgainstOneDevice(jax=on_jax, torch=on_ranks(Ranks(MOST["torch"], in_group, LIMIT_S)))


def trained(seed: int, number: int, dtype: str) -> Result:
    """How much the layout of a number differs from one device, and a message where it fails."""
    drawn = draw(seed, number, most=MOST, dtype=dtype)
    start = time.monotonic()
    try:
        apart, wrong = _against.assert_same(drawn), ""
    except Exception as error:  # Any error is reported, and the next layout is trained.
        apart, wrong = NOT_KNOWN, f"{type(error).__name__}: {error}\n  {drawn.text}"
    return result(drawn, apart, wrong, time.monotonic() - start)


def result(drawn: Drawn, apart: Apart, wrong: str, seconds: float) -> Result:
    plan = drawn.plan
    layout = plan.request.layout
    return Result(
        number=drawn.number,
        engine=drawn.engine,
        family=drawn.family,
        axes=len(plan.mesh.larger_than_one(plan.mesh.names)),
        attention=layout.move_attention if plan.cp else "",
        moe=layout.move_moe if any("expert" in entry.roles.values() for entry in layout.entries.values()) else "",
        another_order=drawn.in_another_order,
        refused=dict(drawn.refused),
        seconds=seconds,
        loss=apart.difference.loss,
        gradient=apart.difference.gradient,
        weight=apart.difference.weight,
        share=apart.share,
        of=apart.of,
        wrong=wrong,
    )


def line(one: Result) -> str:
    words = f"{one.number} {one.engine} {one.family} {one.attention} {one.moe}, {one.seconds:.1f} s"
    far = f"loss {one.loss:.1e}, gradient {one.gradient:.1e}" + (f", {one.share:.2f} of the bound" if one.of else "")
    return f"{words} WRONG: {one.wrong}" if one.wrong else f"{words}: {far}"


if __name__ == "__main__":
    sys.exit(main())

"""Command-line options of every benchmark, and the devices it runs on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import jax

from benchmarks.results import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``quick``: fewer and shorter measurements. ``only``: text that the name of a case must contain."""

    quick: bool
    only: str
    load_before: float

    def blocks(self, number: int) -> int:
        """Number of blocks of steps, between which the steps alternate."""
        return 3 if self.quick else number

    def block_s(self, seconds: float) -> float:
        """Approximate duration of a block."""
        return seconds / 2 if self.quick else seconds


def begin(about: str | None, *, devices: int | None) -> Options:
    """Read the command line. ``devices``: number of simulated CPU devices; None: the accelerators of the machine."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and fewer blocks")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    given = parser.parse_args()
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    return Options(quick=given.quick, only=given.only, load_before=load())

"""Numbers of a user's own chips, from a file: ``--chips h100:8x8+mine.toml``. `shardwright calibrate` writes such files.

```toml
kind = "h100"            # the chips that the numbers are of
program = "compiled"     # or "eager", or "fused" by hand: what runs, where that is not the engine's own
overlap = ["tensor"]     # gathers and scatters of tensor parallelism run inside of its products; "data": sums over replicas beside passes;
                         # "expert": exchanges of tokens beside another microbatch's products
graphs = ["attention"]   # CUDA graphs of parts of a layer with experts, or of "step": no host starts their kernels one by one
tokens_once = true       # a token is sent once to each device that has an expert of it, as DeepEP and HybridEP do

[numbers]                # they replace those of the table (chips.toml, measured.toml)
scale_out_bytes_per_s = 25e9
product_bf16_flops_per_s = { value = 640e12, source = "measured here", date = "2026-11-23" }
```

A kind that the table lacks needs ``name``, ``network`` (``torus`` or ``switch``) and the numbers of ``NEEDED``.
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.cost.hardware.chips import ChipNumbers, Cited, Number, chip_of, chips

LARGEST_FILE = 1 << 20
KEYS = {"kind", "name", "network", "program", "overlap", "graphs", "tokens_once", "numbers", "measured"}
PROGRAMS = ("eager", "compiled", "fused")
OVERLAPS = ("tensor", "data", "expert")
"""The roles whose collectives a program may run inside of its products, or, of replicas, beside the passes of a step, or, of experts, beside the
products of another microbatch."""
GRAPHS = ("attention", "router", "step")
"""What may be a graph, whose kernels are started at once."""

OF_RUNS = {"step_latency_s"}
"""Numbers that only a file has."""
OF_EVERY_CHIP = ("usable_bytes", "devices_per_chip", "bf16_flops_per_s", "float32_share_of_bf16", "hbm_bytes_per_s")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "torus": (
        *OF_EVERY_CHIP,
        "matrix_unit_side",
        "torus_dims",
        "pod_chips",
        "longest_dim_chips",
        "wraps_at_multiples_of_chips",
        "link_bytes_per_s",
        "hop_latency_s",
    ),
    "switch": (*OF_EVERY_CHIP, "domain_devices", "scale_up_bytes_per_s", "base_latency_s"),
}
"""The numbers that a kind of chip needs, by its network."""


def with_file(kind: str, base: ChipNumbers | None, file: str) -> ChipNumbers:
    """The chip's numbers with those of a file. ``base`` None: the table has no such kind, and the file gives all of it.

    Raises InputError for a file that cannot be read, that is of another kind, or that lacks a number.
    """
    found = _read(file)
    numbers = _numbers(found, file)
    if found.get("kind") != kind:
        raise InputError(
            f"--chips: {file} has numbers of '{found.get('kind')}', and the chips are '{kind}'. Give the file of these chips, "
            f"or leave it out."
        )
    program = found.get("program")
    if program not in (None, *PROGRAMS):
        raise InputError(f"--chips: 'program' in {file} is {program!r}, and must be one of {', '.join(PROGRAMS)}.")
    overlap, graphs = _words(found, "overlap", OVERLAPS, file), _words(found, "graphs", GRAPHS, file)
    once = found.get("tokens_once", False)
    if not isinstance(once, bool):
        raise InputError(f"--chips: 'tokens_once' in {file} is {once!r}, and must be true or false.")
    if base is not None:
        return replace(
            base,
            numbers={**base.numbers, **numbers},
            program=program or base.program,
            overlap=overlap or base.overlap,
            graphs=graphs or base.graphs,
            tokens_once=once or base.tokens_once,
        )
    name, network = found.get("name"), found.get("network")
    if not isinstance(name, str) or not isinstance(network, str) or network not in NEEDED:
        raise InputError(
            f"--chips: no chip is called '{kind}', and {file} does not say what it is: it needs 'name', and 'network' as one of "
            f"{', '.join(NEEDED)}."
        )
    missing = [each for each in NEEDED[network] if each not in numbers]
    if missing:
        raise InputError(f"--chips: {file} lacks numbers of '{kind}': {', '.join(missing)}.")
    return ChipNumbers(
        kind=kind,
        name=name,
        network=network,
        numbers=numbers,
        program=program,
        overlap=overlap,
        graphs=graphs,
        tokens_once=once,
    )


def _words(found: Mapping[str, Any], key: str, words: tuple[str, ...], file: str) -> tuple[str, ...]:
    """The words of a list of a file; none where it has no such list."""
    listed = found.get(key, [])
    if not isinstance(listed, list) or any(word not in words for word in listed):
        raise InputError(f"--chips: '{key}' in {file} is {listed!r}, and must be a list of {', '.join(words)}.")
    return tuple(listed)


def base_of(kind: str, files: tuple[str, ...]) -> ChipNumbers | None:
    """The chip of the table; None where it has no such kind and a file is given for it."""
    return chip_of(kind) if kind in chips() or not files else None


def _read(file: str) -> Mapping[str, Any]:
    path = Path(file)
    try:
        kind = path.stat()
        if stat.S_ISFIFO(kind.st_mode) or stat.S_ISCHR(kind.st_mode):
            # To read one could wait for ever.
            raise InputError(f"--chips: {file} is a pipe or a device. Name a file of numbers of chips.")
        if kind.st_size > LARGEST_FILE:
            raise InputError(
                f"--chips: {file} has more than {LARGEST_FILE >> 20} MiB, and is no file of numbers of chips."
            )
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--chips: {file} cannot be read as TOML: {reason}.") from None
    for key in found:
        if key not in KEYS:
            raise InputError(f"--chips: {file} has '{key}'. {did_you_mean(key, sorted(KEYS))}")
    return found


def _numbers(found: Mapping[str, Any], file: str) -> dict[str, Number]:
    table = found.get("numbers", {})
    if not isinstance(table, Mapping):
        raise InputError(f"--chips: 'numbers' in {file} must be a table, as [numbers].")
    known = (
        OF_RUNS
        | {name for chip in chips().values() for name in chip.numbers}
        | {name for names in NEEDED.values() for name in names}
    )
    return {name: _number(name, value, file, known) for name, value in table.items()}


def _number(name: str, given: object, file: str, known: set[str]) -> Number:
    if name not in known:
        raise InputError(f"--chips: {file} has a number '{name}'. {did_you_mean(name, sorted(known))}")
    others = given.get("others", []) if isinstance(given, Mapping) else []
    if not isinstance(others, list):
        raise InputError(f"--chips: 'others' of '{name}' in {file} must be a list of numbers with their sources.")
    return Number(
        used=_cited(name, given, file, {*CITED, "others"}),
        others=tuple(_cited(name, one, file, CITED) for one in others),
    )


CITED = {"value", "source", "date"}
COUNTS = {
    "matrix_unit_side",
    "torus_dims",
    "multiprocessors",
    "collectives_at_once",
    "devices_per_chip",
    "domain_devices",
    "linked_devices",
} | {name for name in NEEDED["torus"] if name.endswith("_chips")}
"""The numbers that are whole."""


def _cited(name: str, given: object, file: str, keys: set[str]) -> Cited:
    cited = given if isinstance(given, Mapping) else {"value": given}
    for key in cited:
        if key not in keys:
            raise InputError(f"--chips: '{name}' in {file} has '{key}'. {did_you_mean(str(key), sorted(keys))}")
    value = cited.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise InputError(f"--chips: '{name}' in {file} is {value!r}, and must be a finite number above 0.")
    if name in COUNTS and value != int(value):
        raise InputError(f"--chips: '{name}' in {file} is {value!r}, and must be a whole number.")
    if name == "usable_bytes" and value < 1:
        raise InputError(f"--chips: '{name}' in {file} is {value!r}, and must be at least 1.")
    source, date = str(cited.get("source", f"file {Path(file).name}")), str(cited.get("date", "as given"))
    return Cited(value=float(value), source=source, date=date)

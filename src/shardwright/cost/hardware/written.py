"""Machines as their sellers write them, and the KIND:SHAPE that each stands for.

| written | read as | why |
|---|---|---|
| `v5p-512` | `v5p:4x8x8` | Cloud TPU's accelerator types count TensorCores of v4, v5p and TPU7x, two on a chip (docs.cloud.google.com/tpu/docs/v5p, 2026) |
| `v5e-16`, `v6e-256` | `v5e:4x4`, `v6e:16x16` | and chips of v5e and v6e, which have one |
| `h100:256` | `h100:32x8` | more GPUs than a node has are nodes |
| `H100:8x8` | `h100:8x8` | kinds are written in small letters |

The shape of a number of chips is the default of Cloud TPU: the dims as equal as they can be, the longest last; of three dims, each a multiple
of 4 from 64 chips on, where a torus closes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardwright.core.findings.errors import InputError
from shardwright.core.layout.wording import count
from shardwright.core.mesh.divisors import divisors
from shardwright.cost.hardware.chips import chips

CORES_IN_NAMES: Mapping[str, int] = {"v4": 2, "v5p": 2, "tpu7x": 2, "v5e": 1, "v6e": 1}
"""TensorCores of a chip, where accelerator types count them; 1 where they count chips."""

OTHER_NAMES: Mapping[str, str] = {"v5litepod": "v5e", "ironwood": "tpu7x", "trillium": "v6e"}
"""Other names of kinds."""

SMALL_TORUS: Mapping[int, tuple[int, int, int]] = {
    1: (1, 1, 1),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
}
"""Shapes of three dims below a cube of 64 chips."""

CUBE_SIDE = 4


def kind_and_shape(text: str) -> str:
    """The text of a machine in the form KIND:SHAPE; any other text unchanged.

    Raises InputError for a number of cores or GPUs that has no shape.

    >>> [kind_and_shape(text) for text in ("v5p-512", "v5e-16", "H100:256", "h100:8x8", "v5litepod-256*2", "tpu7x-256")]
    ['v5p:4x8x8', 'v5e:4x4', 'h100:32x8', 'h100:8x8', 'v5e:16x16*2', 'tpu7x:4x4x8']
    """
    machine, plus, files = text.partition("+")
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9]*(?:-[0-9]+gb)?)([:-])([1-9][0-9]{0,9})(\*[1-9][0-9]{0,9})?", machine)
    if match is None:
        kind, colon, shape = machine.partition(":")
        return f"{_kind(kind)}{colon}{shape}{plus}{files}"
    kind, number = _kind(match[1]), int(match[3])
    if match[2] == "-" and kind in CORES_IN_NAMES:
        return f"{kind}:{_slice(text, kind, number)}{match[4] or ''}{plus}{files}"
    if match[2] == ":" and match[4] is None and (nodes := _nodes(text, kind, number)) is not None:
        return f"{kind}:{nodes}{plus}{files}"
    return text if match[2] == "-" else f"{kind}:{match[3]}{match[4] or ''}{plus}{files}"


def _kind(text: str) -> str:
    kind = text.lower()
    return OTHER_NAMES.get(kind, kind)


def _slice(text: str, kind: str, number: int) -> str:
    """The shape of a slice with so many cores."""
    cores = CORES_IN_NAMES[kind]
    if number % cores:
        raise InputError(
            f"--chips: '{text}' counts TensorCores, of which a chip of {kind} has {cores}: {number} is no multiple of it."
        )
    dims = 3 if "torus_dims" not in chips()[kind].numbers else chips()[kind].integer("torus_dims")
    shape = _equal_dims(number // cores, dims)
    if shape is None:
        raise InputError(
            f"--chips: '{text}' is {number // cores} chips of {kind}, and no slice has so many. Give its shape, as {kind}:{'x'.join('4' * dims)}."
        )
    return "x".join(map(str, shape))


def _equal_dims(count: int, dims: int) -> Sequence[int] | None:
    if dims == 3 and count < CUBE_SIDE**3:
        return SMALL_TORUS.get(count)
    unit = CUBE_SIDE if dims == 3 else 1
    if count % unit**dims:
        return None
    shapes = _ascending(count // unit**dims, dims)
    best = min(shapes, key=lambda shape: tuple(reversed(shape)))
    return [unit * size for size in best]


def _ascending(count: int, dims: int, least: int = 1) -> list[tuple[int, ...]]:
    """Every way to write a number as a product of so many factors, the smallest first."""
    if dims == 1:
        return [(count,)] if count >= least else []
    firsts = [size for size in divisors(count) if least <= size and size**dims <= count]
    return [(size, *rest) for size in firsts for rest in _ascending(count // size, dims - 1, size)]


def _nodes(text: str, kind: str, number: int) -> str | None:
    """So many GPUs as nodes; None where they fit one, and for kinds that have none."""
    chip = chips().get(kind)
    if chip is None or "domain_devices" not in chip.numbers:
        return None
    in_node = chip.integer("domain_devices")
    if number <= in_node:
        return None
    if number % in_node:
        raise InputError(
            f"--chips: '{text}' is {number} GPUs, and a node of {chip.name} has {in_node}: {count(number // in_node, 'node')} and {number % in_node} more. "
            f"Give nodes and GPUs, as {kind}:{number // in_node}x{in_node}."
        )
    return f"{number // in_node}x{in_node}"

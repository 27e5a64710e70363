"""The device groups of a collective, and the mesh axes along which they differ.

Groups and pairs hold positions of devices in the flattened mesh, not physical device ids.

| text | groups |
|---|---|
| `replica_groups={{0,2},{1,3}}` | as listed; `{}` is all devices |
| `replica_groups=[2,4]<=[4,2]T(1,0)` | 0 to 7 reshaped to 4 x 2, transposed, then split into 2 rows of 4 |
| `replica_groups=mesh['a'=4,'b'=2] {'a'}` | a mesh that the compiler defines: along its axis `a` |
| `replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}` | the same, with another device order |
| `replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}` | along the major 2 of the 4 of `a` |
| `source_target_pairs={{0,1},{1,0}}` | pairs: from, to |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from shardwright.core.findings.errors import InputError

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_NAMED = re.compile(r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{[^}]*\})")
_PAIRS = re.compile(r"source_target_pairs=\"?\{((?:\{\d+,\d+\},?)*)\}")

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_ALONG = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(rest: str, num_devices: int) -> Groups:
    """The groups in an instruction's attributes, in any form; all devices if there are none.

    Raises InputError for an unknown form: otherwise the collective would be missing silently.

    >>> replica_groups("(%x), replica_groups={{0,2},{1,3}}", 4), replica_groups("(%x), replica_groups={}", 2)
    (((0, 2), (1, 3)), ((0, 1),))
    >>> replica_groups("(%x), replica_groups=[2,4]<=[4,2]T(1,0)", 8)
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> replica_groups("(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    if found := _LISTED.search(rest):
        return _listed(found[1]) or (tuple(range(num_devices)),)
    if found := _COUNTED.search(rest):
        return _counted(found[1])
    if found := _NAMED.search(rest):
        return _named(found[1])
    _, written, form = rest.partition("replica_groups=")
    if written:
        raise InputError(
            f"The program has device groups in a form that this version does not know: 'replica_groups={form[:60]}'."
        )
    return (tuple(range(num_devices)),)


def source_target_pairs(rest: str) -> Groups | None:
    """Source and target of each pair; None if there are no pairs.

    >>> source_target_pairs("(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    found = _PAIRS.search(rest)
    return _listed(found[1]) if found else None


@lru_cache(maxsize=1024)
def axes_along(groups: Groups, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ, in mesh order.

    Each device is compared with the first of its group, so that the work is linear in the number of devices.

    >>> axes_along(((0, 4), (1, 5)), ("data", "fsdp", "expert"), (1, 2, 4))
    ('fsdp',)
    >>> axes_along(((0, 5),), ("fsdp", "expert"), (2, 4))
    ('fsdp', 'expert')
    """
    strides = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    left = [(name, size, stride) for name, size, stride in zip(names, sizes, strides, strict=True) if size > 1]
    found: set[str] = set()
    for first, *others in groups:
        for other in others:
            if not left:
                break
            differ = [axis for axis in left if first // axis[2] % axis[1] != other // axis[2] % axis[1]]
            if differ:
                found.update(name for name, _, _ in differ)
                left = [axis for axis in left if axis not in differ]
    return tuple(name for name in names if name in found)


@lru_cache(maxsize=1024)
def _listed(text: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))


@lru_cache(maxsize=1024)
def _counted(text: str) -> Groups:
    shape, laid_out, perm = _iota(text)
    return _rows(_laid_out(laid_out, perm), shape[-1])


@lru_cache(maxsize=1024)
def _named(text: str) -> Groups:
    found = _MESH.fullmatch(text)
    assert found is not None, text
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(found[1])]
    sizes, along = _split(axes, _ALONG.findall(found[3]))
    order = _order(found[2], prod(sizes))
    others = [dim for dim in range(len(sizes)) if dim not in along]
    grid = _laid_out(sizes, (*others, *along))
    return _rows([order[place] for place in grid], prod(sizes[dim] for dim in along))


def _split(axes: Sequence[tuple[str, int]], along: Iterable[tuple[str, str, str]]) -> tuple[list[int], list[int]]:
    """The sizes of the axes, with each sub-axis that is used split off, and the positions of the axes that are used."""
    sub_axes = {name: (int(before), int(size)) if size else None for name, before, size in along}
    sizes: list[int] = []
    places: dict[str, int] = {}
    for name, size in axes:
        sub_axis = sub_axes.get(name)
        before, taken = sub_axis or (1, size)
        places[name] = len(sizes) + (1 if sub_axis else 0)
        sizes += [before, taken, size // (before * taken)] if sub_axis else [size]
    return sizes, [places[name] for name in sub_axes]


def _order(device_ids: str | None, number: int) -> Sequence[int]:
    """The devices in the order of the compiler's mesh."""
    if not device_ids:
        return range(number)
    if _IOTA.fullmatch(device_ids):
        _, laid_out, perm = _iota(device_ids)
        return _laid_out(laid_out, perm)
    return [int(device) for device in re.findall(r"\d+", device_ids)]


def _iota(text: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The result shape, the shape of the iota, and its permutation of dims."""
    found = _IOTA.fullmatch(text)
    assert found is not None, text
    shape = _numbers(found[1])
    laid_out = _numbers(found[2]) if found[2] else shape
    return shape, laid_out, _numbers(found[3]) if found[3] else tuple(range(len(laid_out)))


def _laid_out(sizes: Sequence[int], perm: Sequence[int]) -> list[int]:
    """0, 1, 2, ... reshaped to ``sizes``, then transposed by ``perm``, flat.

    >>> _laid_out((2, 3), (1, 0))
    [0, 3, 1, 4, 2, 5]
    """
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    steps = [range(0, sizes[dim] * strides[dim], strides[dim]) for dim in perm]
    return [sum(place) for place in product(*steps)]


def _rows(numbers: Sequence[int], length: int) -> Groups:
    return tuple(tuple(numbers[start : start + length]) for start in range(0, len(numbers), length))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)

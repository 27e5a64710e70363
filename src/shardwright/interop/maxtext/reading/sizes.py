"""Sizes of the mesh axes: for each axis a key within a slice (``ici_``) and one between slices (``dcn_``); -1: the remaining devices.

MaxText multiplies the sizes of the axes that the mesh has and ignores the others: a size for an axis that the mesh lacks is
dropped, and the axis with -1 takes its devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from shardwright.core.findings.bounds import BOUNDS, number_text
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import did_you_mean, nearest
from shardwright.core.findings.position import Position
from shardwright.core.layout.wording import count
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.reading import SIZE_KEY
from shardwright.interop.maxtext.reading.vocabulary import ALWAYS_ONE, AXES, FILLS, SIZE_KEY_NAMES

LINKS = {"dcn": "between slices", "ici": "within a slice"}
UNITS = {"dcn": "slice", "ici": "device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The number of devices. ``num`` None: the product of the sizes; where one is -1, the devices of ``natural``, which is
    also used where no file has a size. ``sizes``: the user's total sizes of axes, which replace those of files; -1 where an axis takes the
    rest, and then no other does."""

    num: int | None = None
    slices: int = 1
    natural: Mapping[str, int] | None = None
    sizes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The mesh, findings on the sizes, and the defaults that were chosen (``--devices``: ``8``)."""

    mesh: Mesh
    findings: tuple[Finding, ...]
    chosen: Mapping[str, str]


def size_key(link: str, axis: str) -> str:
    """
    >>> size_key("ici", "stage")
    'ici_pipeline_parallelism'
    """
    return f"{link}_{SIZE_KEY_NAMES.get(axis, axis)}_parallelism"


def sized(configuration: Configuration, devices: Devices) -> Sizing:
    """The mesh of a configuration.

    Raises FindingsError (SW106) where the sizes give no mesh, and InputError for a size of the user's for an axis that the
    mesh lacks.
    """
    axes = tuple(str(scalar.value) for scalar in configuration.mesh_axes)
    given = devices.sizes or {}
    for axis in given:
        if axis not in axes:
            raise InputError(f"--mesh: the mesh has no axis '{axis}'. {did_you_mean(axis, axes)}")
        if axis in ALWAYS_ONE and given[axis] != 1:
            raise InputError(f"--mesh {axis} is {given[axis]}, and MaxText's meshes have it with size 1.")
    notes = (*_unknown_axes(configuration), *_unknown_keys(configuration), *_dropped(configuration, axes))
    if not configuration.sizes and not given and devices.num is None and devices.natural:
        sizes = _natural(axes, devices.natural)
        text = ",".join(f"{axis}={sizes[axis]}" for axis in axes if axis in devices.natural or sizes[axis] > 1)
        return Sizing(mesh=_mesh(axes, sizes), findings=notes, chosen={"--mesh": text})
    chosen: dict[str, str] = {}
    faults: list[Finding] = []
    between = {axis: 1 if axis in given else _size_of(configuration, "dcn", axis) for axis in axes}
    within = {axis: given.get(axis) or _size_of(configuration, "ici", axis) for axis in axes}
    if -1 in given.values():
        within = {axis: 1 if size == -1 and axis not in given else size for axis, size in within.items()}
    num = devices.num
    if num is None and -1 in within.values():
        num = _natural_devices(devices, within)
        chosen["--devices"] = str(num)
    slices = _filled(configuration, "dcn", between, devices.slices, faults)
    if num is not None and num % devices.slices:
        raise InputError(f"{count(num, 'device')} do not make {count(devices.slices, 'slice')} of one size.")
    inside = _filled(configuration, "ici", within, None if num is None else num // devices.slices, faults)
    if not faults:
        faults += _too_many(configuration, {axis: slices[axis] * inside[axis] for axis in axes}, given)
    if faults:
        raise FindingsError([*faults, *notes])
    return Sizing(mesh=_mesh(axes, {axis: slices[axis] * inside[axis] for axis in axes}), findings=notes, chosen=chosen)


def _mesh(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Mesh:
    return Mesh(tuple(Axis(name=axis, size=sizes[axis]) for axis in axes))


def _natural(axes: tuple[str, ...], natural: Mapping[str, int]) -> dict[str, int]:
    """The model's natural sizes for the axes of the mesh; the devices of other axes go to ``fsdp``."""
    sizes = {axis: natural.get(axis, 1) for axis in axes}
    fills = next((axis for axis in ("fsdp", *axes) if axis in axes), None)
    if fills is not None:
        sizes[fills] *= prod(natural.values()) // prod(sizes.values())
    return sizes


def _natural_devices(devices: Devices, within: Mapping[str, int]) -> int:
    known = prod(size for size in within.values() if size != -1) * devices.slices
    return max(1, prod((devices.natural or {}).values()) // known) * known


def _size_of(configuration: Configuration, link: str, axis: str) -> int:
    if axis in ALWAYS_ONE:
        return 1
    scalar = configuration.sizes.get(size_key(link, axis))
    if scalar is not None:
        return int(scalar.value)
    return -1 if axis == FILLS[link] else 1


def _filled(
    configuration: Configuration, link: str, given: Mapping[str, int], available: int | None, faults: list[Finding]
) -> dict[str, int]:
    """The sizes with -1 replaced; ``available`` None: any product."""
    open_axes = [axis for axis, size in given.items() if size == -1]
    known = prod(size for size in given.values() if size != -1)
    sizes = {axis: max(size, 1) for axis, size in given.items()}
    large = [f"{axis} {size}" for axis, size in given.items() if size > 1] or ["no axis above 1"]
    product = " x ".join(large) + (f" = {known}" if len(large) > 1 else "")
    place = next((w.position for k, w in configuration.sizes.items() if k.startswith(link) and w.value != 1), None)
    if len(open_axes) > 1:
        found = f"-1 for {' and '.join(map(repr, open_axes))}"
        place = next(
            (w.position for k, w in configuration.sizes.items() if k.startswith(link) and w.value == -1), place
        )
        faults.append(_fault(place, f"sizes {LINKS[link]}", found, "-1 for one axis at most"))
    elif available is not None and open_axes and available % known == 0:
        sizes[open_axes[0]] = available // known
    elif available is not None and (open_axes or known != available):
        needed = f"a product that divides {available}" if open_axes else count(available, UNITS[link])
        more = "" if open_axes or link == "ici" else "; --slices gives their number"
        faults.append(_fault(place, f"sizes {LINKS[link]}", product, needed + more))
    return sizes


def _too_many(configuration: Configuration, sizes: Mapping[str, int], given: Mapping[str, int]) -> Iterator[Finding]:
    """Sizes that are allowed alone but whose product is too large. Nothing is computed on such a mesh: that would take all memory."""
    most = BOUNDS["devices"].most
    if prod(sizes.values()) > most:
        own = None if given else next((w.position for w in configuration.sizes.values() if int(w.value) > 1), None)
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        found = f"{product} = {number_text(prod(sizes.values()))} devices"
        yield _fault(own, "sizes of the mesh", found, f"at most {number_text(most)}", BOUNDS["devices"].fix)


def _fault(place: Position | None, where: str, found: str, needed: str, fix: str = "") -> Finding:
    return Finding(code="SW106", severity="error", where=where, found=found, needed=needed, fix=fix, position=place)


def _dropped(configuration: Configuration, axes: tuple[str, ...]) -> Iterator[Finding]:
    """Sizes of axes that the mesh does not have: MaxText reads and ignores them."""
    for key, scalar in configuration.sizes.items():
        own = _axes_of(key)
        if not own or set(own) & set(axes) or scalar.value in (1, -1):
            continue
        axis = own[0]
        link = key[:3]
        fills = next((a for a in axes if _size_of(configuration, link, a) == -1), None)
        taken = f", and '{fills}' takes the devices" if fills else ""
        yield Finding(
            code="SW106",
            severity="error",
            where=f"'{key}'",
            position=scalar.position,
            found=f"size {scalar.value} for '{axis}', which the mesh ({', '.join(axes)}) does not have: MaxText drops it "
            f"silently{taken}",
            needed=f"a size for an axis of the mesh, or '{axis}' among 'mesh_axes'",
            fix=f"Take '{key}' out.",
            cost=f"dims meant to be sharded {scalar.value} ways over '{axis}' are not",
        )


def _axes_of(key: str) -> tuple[str, ...]:
    """The axes whose size a key sets; ``ici_tensor_parallelism`` sets that of ``tensor``, and also of ``model``."""
    match = SIZE_KEY.fullmatch(key)
    assert match is not None, key
    return tuple(a for a in AXES if a not in ALWAYS_ONE and SIZE_KEY_NAMES.get(a, a) == match["axis"])


def _unknown_keys(configuration: Configuration) -> Iterator[Finding]:
    known = [SIZE_KEY_NAMES.get(axis, axis) for axis in AXES if axis not in ALWAYS_ONE]
    for key, scalar in configuration.sizes.items():
        if not _axes_of(key):
            match = SIZE_KEY.fullmatch(key)
            assert match is not None
            near = nearest(match["axis"], known)
            yield Finding(
                code="SW111",
                severity="error",
                where=f"'{key}'",
                position=scalar.position,
                found=f"a size for '{match['axis']}', and MaxText has no such axis",
                needed=f"one of {', '.join(dict.fromkeys(known))}",
                fix=f"Write '{match['link']}_{near}_parallelism'." if near else "",
            )


def _unknown_axes(configuration: Configuration) -> Iterator[Finding]:
    for scalar in configuration.mesh_axes:
        axis = str(scalar.value)
        if axis not in AXES:
            near = nearest(axis, AXES)
            yield Finding(
                code="SW111",
                severity="error",
                where=f"mesh axis '{axis}'",
                position=scalar.position,
                found=f"MaxText has no size for '{axis}': it ends with a KeyError",
                needed=f"one of {', '.join(AXES)}",
                fix=f"Write '{near}'." if near else "",
            )

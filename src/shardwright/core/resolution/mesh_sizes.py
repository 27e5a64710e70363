"""Sizes of the mesh axes: the layout's, the request's, and ``auto`` for the remaining devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import gcd, prod

from shardwright.core.findings.bounds import BOUNDS
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.layout.layout import Auto, Layout
from shardwright.core.layout.wording import count, either
from shardwright.core.mesh.divisors import nearest_divisors, nearest_multiples
from shardwright.core.mesh.hops import WholeSlice
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.resolution.request import Request

Sizes = Mapping[str, int | Auto]


def resolve_mesh(request: Request) -> tuple[Mesh, tuple[Finding, ...]]:
    """The mesh of a request, with the findings that are not errors.

    Raises FindingsError (SW106, SW111): an unknown axis, a size below 1, `auto` twice, sizes whose product is not the
    number of devices, or exceeds the bound of any plan. Each fix in it has been checked to give a mesh.
    """
    faults = mesh_faults(request)
    if faults:
        raise FindingsError([fault.settled(lambda c, f=fault: fixes(f, c, request)) for fault in faults])
    sizes, notes = _sizes(request), ()
    fixed, automatic = _split(sizes)
    if automatic:
        known = prod(fixed.values())
        devices = request.devices
        if devices is None:
            devices = _natural_devices(request, known)
            notes = (_default_devices_finding(request, automatic[0], devices // known, devices),)
        fixed[automatic[0]] = devices // known
    axes = tuple(Axis(name=a, size=fixed[a], link=entry.link) for a, entry in request.layout.mesh.items())
    chip = request.chip
    whole_slice = chip.whole_slice if chip and chip.accelerator in request.properties.accelerators else None
    return _mesh(axes, whole_slice and whole_slice.by(request.hops)), notes


@lru_cache(maxsize=256)
def _mesh(axes: tuple[Axis, ...], whole_slice: WholeSlice | None) -> Mesh:
    # The same object for all requests on a mesh: what is derived from it is looked up by it.
    return Mesh(axes, whole_slice)


def mesh_faults(request: Request) -> tuple[Draft, ...]:
    """The errors in the sizes; none where there is a mesh."""
    return tuple(_faults(request))


def fixes(fault: Draft, candidate: Candidate, request: Request) -> bool:
    """Whether a candidate removes a fault and adds no other."""
    left = {other.key for other in _faults(candidate.edit(request))}
    return fault.key not in left and left <= {other.key for other in _faults(request)}


def is_automatic(request: Request, axis: str) -> bool:
    """Whether an axis takes the remaining devices, by the request or else by its layout."""
    return request.mesh_sizes.get(axis, request.layout.mesh[axis].size) == "auto"


def resized_mesh(request: Request, changes: Mapping[str, int]) -> Candidate:
    """Other sizes of mesh axes: ``--mesh fsdp=16,tensor=4``. The text has every size that was given, since it takes the option's place."""
    return Candidate(
        text=mesh_option({**request.mesh_sizes, **changes}),
        edit=lambda old: replace(old, mesh_sizes={**old.mesh_sizes, **changes}),
    )


def mesh_option(sizes: Sizes) -> str:
    """
    >>> mesh_option({"fsdp": 2, "expert": 4})
    '--mesh fsdp=2,expert=4'
    """
    return f"--mesh {mesh_text(sizes)}"


def mesh_text(sizes: Sizes) -> str:
    """The value of that option.

    >>> mesh_text({"fsdp": "auto", "expert": 4})
    'fsdp=auto,expert=4'
    """
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def fitted_sizes(layout: Layout, devices: int) -> dict[str, int]:
    """Sizes of a layout's axes for the devices that there are: a size is reduced to what divides them, ``auto`` takes the rest.

    Without ``auto`` some devices may be left over.
    """
    sizes, left = {}, devices
    for axis, entry in layout.mesh.items():
        if isinstance(entry.size, int):
            sizes[axis] = gcd(entry.size, left)
            left //= sizes[axis]
    return {axis: sizes.get(axis, left) for axis in layout.mesh}


def _faults(request: Request) -> Iterator[Draft]:
    layout = request.layout
    for axis in request.mesh_sizes:
        if axis not in layout.mesh:
            yield _unknown(request, axis)
    sizes = _sizes(request)
    fixed, automatic = _split(sizes)
    wrong = {axis: 1 for axis, size in fixed.items() if size < 1}
    for axis, size in fixed.items():
        if size < 1:
            found = f"size {size}"
            fill = _filling({**fixed, **wrong}, axis, request.devices)
            candidates = tuple(resized_mesh(request, {**wrong, axis: size}) for size in (1, *fill))
            yield _fault(layout, axis, f"mesh axis '{axis}'", found, "a size of at least 1", candidates)
    if len(automatic) > 1:
        yield _fault(
            layout,
            automatic[1],
            f"mesh of layout '{layout.name}'",
            f"'auto' {len(automatic)} times: {', '.join(automatic)}",
            "'auto' at most once",
            tuple(
                resized_mesh(request, dict.fromkeys(automatic[:k] + automatic[k + 1 :], 1))
                for k in reversed(range(len(automatic)))
            ),
        )
    devices = request.devices
    if len(automatic) > 1 or any(size < 1 for size in fixed.values()):
        return
    known = prod(fixed.values())
    product = " x ".join(f"{name} {size}" for name, size in fixed.items())
    product = product if len(fixed) == 1 else f"{product} = {known}"
    most = BOUNDS["devices"].most
    if known > most:
        where, needed = f"mesh of layout '{layout.name}'", f"at most {most} devices"
        yield _fault(layout, next(iter(fixed)), where, product, needed, tuple(_smaller(request, fixed, most)))
        return
    if devices is None:
        return
    candidates = (
        *_one_size(request, fixed, devices, filled=not automatic),
        *_devices(known, devices, exact=not automatic),
    )
    where = f"mesh of layout '{layout.name}'"
    if automatic and devices % known:
        found = f"{product}, which does not divide {count(devices, 'device')}"
        needed = f"a product that divides {devices}, or {either(nearest_multiples(known, devices))} devices"
        yield _fault(layout, automatic[0], where, found, needed, candidates)
    elif not automatic and known != devices:
        yield _fault(layout, next(iter(fixed)), where, product, count(devices, "device"), candidates)


def _sizes(request: Request) -> Sizes:
    sizes: dict[str, int | Auto] = {axis: entry.size for axis, entry in request.layout.mesh.items()}
    sizes.update((axis, size) for axis, size in request.mesh_sizes.items() if axis in sizes)
    return sizes


def _split(sizes: Sizes) -> tuple[dict[str, int], list[str]]:
    """The sizes that are numbers, and the axes whose size is `auto`."""
    fixed = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    return fixed, [axis for axis, size in sizes.items() if size == "auto"]


def _natural_devices(request: Request, known: int) -> int:
    natural = prod((request.table.natural_mesh or {}).values())
    return max(1, natural // known) * known


def _default_devices_finding(request: Request, axis: str, size: int, devices: int) -> Finding:
    """Without a number of devices, `auto` is the rest of the model's natural mesh, and the finding reports it."""
    return Finding(
        code="SW106",
        severity="info",
        where=f"mesh axis '{axis}' of layout '{request.layout.name}'",
        found=f"'auto' without a number of devices: {axis} = {size}, for the {count(devices, 'device')} "
        f"that {request.table.name} is planned on by default",
        needed="a number of devices, or a size",
        fix=f"--devices {devices}, or {mesh_option({**request.mesh_sizes, axis: size})}, states it",
        position=request.layout.mesh[axis].position,
    )


def _filling(fixed: Mapping[str, int], axis: str, devices: int | None) -> tuple[int, ...]:
    """The size with which an axis fills the devices; none where the others do not divide them."""
    others = prod(size for name, size in fixed.items() if name != axis)
    return () if devices is None or devices % others else (devices // others,)


def _one_size(request: Request, fixed: Mapping[str, int], devices: int, *, filled: bool) -> Iterator[Candidate]:
    """One size changed, the largest axis first: to the size that fills the devices, or to the nearest divisors."""
    for axis, size in sorted(fixed.items(), key=lambda item: -item[1]):
        others = prod(fixed.values()) // size
        if devices % others == 0:
            left = devices // others
            sizes = (left,) if filled else nearest_divisors(left, size)
            yield from (resized_mesh(request, {axis: other}) for other in sizes)


def _smaller(request: Request, fixed: Mapping[str, int], most: int) -> Iterator[Candidate]:
    """One size reduced, the largest axis first, so that the product is at most the bound."""
    for axis, size in sorted(fixed.items(), key=lambda item: -item[1]):
        yield resized_mesh(request, {axis: most // (prod(fixed.values()) // size)})


def _devices(known: int, devices: int, *, exact: bool) -> Iterator[Candidate]:
    for number in (known,) if exact else reversed(nearest_multiples(known, devices)):
        yield Candidate(text=f"--devices {number}", edit=lambda request, n=number: replace(request, devices=n))


def _fault(layout: Layout, axis: str, where: str, found: str, needed: str, candidates: tuple[Candidate, ...]) -> Draft:
    return Draft(
        finding=Finding(
            code="SW106",
            severity="error",
            where=where,
            found=found,
            needed=needed,
            position=layout.mesh[axis].position,
        ),
        candidates=candidates,
    )


def _unknown(request: Request, axis: str) -> Draft:
    layout = request.layout
    match = nearest(axis, layout.mesh)

    def named(sizes: Sizes) -> Sizes:
        return {str(match) if name == axis else name: size for name, size in sizes.items() if name != match}

    return Draft(
        finding=Finding(
            code="SW111",
            severity="error",
            where=f"a mesh size for '{axis}'",
            found=f"layout '{layout.name}' has no mesh axis '{axis}'",
            needed=f"one of {', '.join(layout.mesh)}",
        ),
        candidates=(
            Candidate(
                text=mesh_option(named(request.mesh_sizes)),
                edit=lambda old: replace(old, mesh_sizes=named(old.mesh_sizes)),
            ),
        )
        if match
        else (),
    )

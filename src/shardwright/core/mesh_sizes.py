"""Sizes of the mesh axes: the layout's, the request's, and ``auto`` for what is left of the devices."""

from __future__ import annotations

from math import prod

from shardwright.core.codes import CODES
from shardwright.core.errors import FindingsError
from shardwright.core.finding import Finding
from shardwright.core.layout import Layout
from shardwright.core.mesh import Axis, Mesh
from shardwright.core.nearest import nearest
from shardwright.core.request import Request


def resolve_mesh(request: Request) -> tuple[Mesh, tuple[Finding, ...]]:
    """The mesh of a request, with the findings that are no errors.

    Raises FindingsError (SW106, SW111): an unknown axis, a size below 1, `auto` twice, sizes that do not
    multiply to the devices.
    """
    layout = request.layout
    errors = [_unknown(axis, layout) for axis in request.mesh_sizes if axis not in layout.mesh]
    sizes: dict[str, int | str] = {
        axis: request.mesh_sizes.get(axis, entry.size) for axis, entry in layout.mesh.items()
    }
    errors += [
        _error(layout, axis, f"mesh axis '{axis}'", f"size {size}", "a size of at least 1", f"--mesh {axis}=1")
        for axis, size in sizes.items()
        if isinstance(size, int) and size < 1
    ]
    automatic = [axis for axis, size in sizes.items() if size == "auto"]
    if len(automatic) > 1:
        errors.append(
            _error(
                layout,
                automatic[1],
                f"mesh of layout '{layout.name}'",
                f"'auto' {len(automatic)} times: {', '.join(automatic)}",
                "'auto' at most once",
                f"Give a size: --mesh {automatic[0]}=1",
            )
        )
    if errors:
        raise FindingsError(errors)
    fixed = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    known = prod(fixed.values())
    devices, notes = request.devices, ()
    if automatic:
        if devices is None:
            devices, notes = _natural_devices(request, automatic[0], known)
        if devices % known:
            raise FindingsError([_does_not_divide(layout, fixed, automatic[0], known, devices)])
        fixed[automatic[0]] = devices // known
    elif devices is not None and known != devices:
        raise FindingsError([_wrong_product(layout, fixed, known, devices)])
    return (
        Mesh(tuple(Axis(name=a, size=fixed[a], link=entry.link) for a, entry in layout.mesh.items())),
        notes,
    )


def _natural_devices(request: Request, axis: str, known: int) -> tuple[int, tuple[Finding, ...]]:
    """Without a number of devices, `auto` becomes what the model's natural mesh leaves for it, and that is said."""
    natural = prod((request.table.natural_mesh or {}).values())
    devices = max(1, natural // known) * known
    finding = Finding(
        code="SW106",
        severity="info",
        where=f"mesh axis '{axis}' of layout '{request.layout.name}'",
        found=f"'auto', and no number of devices: {axis} = {devices // known}, for the {devices} devices "
        f"that {request.table.name} is planned on unless said otherwise",
        needed="a number of devices, or a size",
        fix=f"--devices {devices}, or --mesh {axis}={devices // known}, says it.",
    )
    return devices, (finding,)


def _error(layout: Layout, axis: str, where: str, found: str, needed: str, fix: str) -> Finding:
    return Finding(
        code="SW106",
        severity=CODES["SW106"].severity,
        where=where,
        found=found,
        needed=needed,
        fix=fix,
        position=layout.mesh[axis].position,
    )


def _unknown(axis: str, layout: Layout) -> Finding:
    match = nearest(axis, layout.mesh)
    return Finding(
        code="SW111",
        severity="error",
        where=f"a mesh size for '{axis}'",
        found=f"layout '{layout.name}' has no mesh axis '{axis}'",
        needed=f"one of {', '.join(layout.mesh)}",
        fix=f"Write '{match}'." if match else "",
    )


def _does_not_divide(layout: Layout, fixed: dict[str, int], axis: str, known: int, devices: int) -> Finding:
    product = " x ".join(f"{name} {size}" for name, size in fixed.items())
    legal = _nearest_multiples(known, devices)
    return _error(
        layout,
        axis,
        f"mesh of layout '{layout.name}'",
        f"{product} = {known}, which does not divide {devices} devices",
        f"a product that divides {devices}, or {legal} devices",
        _largest_change(fixed, devices),
    )


def _wrong_product(layout: Layout, fixed: dict[str, int], known: int, devices: int) -> Finding:
    product = " x ".join(f"{name} {size}" for name, size in fixed.items())
    return _error(
        layout,
        next(iter(fixed)),
        f"mesh of layout '{layout.name}'",
        f"{product} = {known}",
        f"{devices} devices",
        _largest_change(fixed, devices) or f"--devices {known}",
    )


def _largest_change(fixed: dict[str, int], devices: int) -> str:
    """The change of one size, the largest axis first, that makes the product right; nothing where no one can."""
    for axis, size in sorted(fixed.items(), key=lambda item: -item[1]):
        others = prod(fixed.values()) // size
        if devices % others == 0:
            return f"--mesh {axis}={devices // others}"
    return ""


def _nearest_multiples(factor: int, number: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)

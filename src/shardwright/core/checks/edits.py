"""Changes of a request that may fix a finding, each with the text that a user would type for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from shardwright.core.findings.draft import Candidate
from shardwright.core.layout.declaration import OPTIONS, plain_options
from shardwright.core.layout.layout import MeshEntry, RoleEntry, Rule
from shardwright.core.layout.role_reading import roles_everywhere, unused_options
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.mesh_sizes import is_automatic, mesh_option, resized_mesh
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.token_hops import TWO_HOPS

T = TypeVar("T")


def option(flag: str, value: Any) -> Candidate:
    """A field of the request with a command-line option of the same name: ``--batch 16``."""
    field = flag.replace("-", "_")
    return Candidate(text=f"--{flag} {value}", edit=lambda request: replace(request, **{field: value}))


def without(flag: str) -> Candidate:
    """An option left out."""
    field = flag.replace("-", "_")
    return Candidate(text=f"leave --{flag} out", edit=lambda request: replace(request, **{field: None}))


def other_recipe(name: str) -> Candidate:
    """Another recipe of low precision: ``--precision mxfp8``."""
    return Candidate(text=f"--precision {name}", edit=lambda request: replace(request, precision=preset(name)))


def of_recipe(plan: Plan, **changes: Any) -> Candidate:
    """Another value for an entry of the recipe: ``reduce_amax: true in the recipe's file``."""
    assert plan.request.precision is not None
    recipe = replace(plan.request.precision, **changes)
    text = ", ".join(f"{name}: {_recipe_text(value)}" for name, value in changes.items())
    return Candidate(text=f"{text} in the recipe's file", edit=lambda request: replace(request, precision=recipe))


def _recipe_text(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    return str(value).lower()


def devices(number: int) -> Candidate:
    """Another number of the chips that are given."""
    return Candidate(
        text=f"--chips of a shape with {number} devices",
        edit=lambda request: replace(request, devices=number),
    )


def both(first: Candidate, second: Candidate) -> Candidate:
    """Two changes at once: ``--batch 128 --microbatches 2``."""
    return Candidate(text=f"{first.text} {second.text}", edit=lambda request: second.edit(first.edit(request)))


def moe_move(way: str) -> Candidate:
    """Another way of tokens to experts: ``move: {moe: ring}``."""

    def edit(request: Request) -> Request:
        return replace(request, layout=replace(request.layout, move_moe=way))

    return Candidate(text=f"move: {{moe: {way}}}", edit=edit)


def by_way_of_nodes(plan: Plan, axis: str, inside: int) -> Iterator[Candidate]:
    """Tokens that go to the experts of an axis in two hops: another axis with its roles is before it, and ``inside`` of its devices are in a
    node. None where a rule names the axis: what the other one shards is not known then."""
    request, size, beside = plan.request, plan.mesh.size(axis), "node"
    layout = request.layout
    if size % inside or inside in (1, size) or beside in layout.mesh:
        return
    if any(axis in rule.axes for rule in layout.rules):
        return
    sizes = {**request.mesh_sizes, beside: size // inside, axis: inside}

    def edit(old: Request) -> Request:
        layout = old.layout
        mesh = {name: part for one, entry in layout.mesh.items() for name, part in _beside(one, entry, axis, beside)}
        entries = {
            name: part for one, entry in layout.entries.items() for name, part in _beside(one, entry, axis, beside)
        }
        return replace(old, layout=replace(layout, mesh=mesh, entries=entries, move_moe=TWO_HOPS), mesh_sizes=sizes)

    roles = _entry_text(layout.entries[axis], named_roles(layout.entries[axis]))
    yield Candidate(
        text=f"an axis '{beside}' before '{axis}' under 'mesh', {beside}: {roles} under 'roles', "
        f"{mesh_option(sizes)} --move moe={TWO_HOPS}",
        edit=edit,
    )


def _beside(name: str, entry: T, axis: str, other: str) -> Iterator[tuple[str, T]]:
    """An entry, and before that of ``axis`` the same under another name."""
    if name == axis:
        yield other, entry
    yield name, entry


def resized(plan: Plan, axis: str, size: int, absorbing: Iterable[str] = ("fsdp", "data")) -> Iterator[Candidate]:
    """An axis at another size on the same devices: an axis of an ``absorbing`` role takes the remaining factor.

    Where no axis can take it, and the number of devices is not set, the axis changes alone.
    """
    request, mesh, roles = plan.request, plan.mesh, tuple(absorbing)
    rest = mesh.size(axis)
    for other in _absorbers(plan, axis, roles):
        wanted, remainder = divmod(mesh.size(other) * rest, size)
        if remainder == 0:
            yield resized_mesh(request, {axis: size} if is_automatic(request, other) else {axis: size, other: wanted})
    if request.devices is None and "fsdp" in roles:
        yield resized_mesh(request, {axis: size})


def _absorbers(plan: Plan, axis: str, roles: tuple[str, ...]) -> list[str]:
    """The axes that could take the devices of another one, in the order of their roles, `auto` axes first in each role."""
    layout = plan.request.layout
    able = [
        (roles.index(entry.elsewhere), not is_automatic(plan.request, other), other)
        for other, entry in layout.entries.items()
        if other != axis and entry.elsewhere in roles and not entry.declared
    ]
    return [other for _, _, other in sorted(able)]


def entry(plan: Plan, axis: str, **changes: Any) -> Candidate:
    """Another entry for an axis: ``elsewhere``, ``named`` roles, ``weights`` or ``sequence_parallel`` replaced."""
    old = plan.request.layout.entries[axis]
    named = changes.pop("named", named_roles(old))
    new = replace(old, declared=frozenset(named), **changes)
    new = replace(new, roles=roles_everywhere(named, new.elsewhere, sequence_parallel=new.sequence_parallel))
    # A layout with an option that no role uses would not be read.
    new = replace(new, **{name: UNSET[name] for name in unused_options(new)})

    def edit(request: Request) -> Request:
        layout = request.layout
        return replace(request, layout=replace(layout, entries={**layout.entries, axis: new}))

    return Candidate(text=f"{axis}: {_entry_text(new, named)} under 'roles'", edit=edit)


UNSET: Mapping[str, bool | None] = {**dict.fromkeys(OPTIONS), "sequence_parallel": False}
"""The value of each option of an entry that is not set."""


def named_roles(entry: RoleEntry, *, without: str | None = None) -> dict[str, str]:
    """The roles that an entry names by component, except for the components of role ``without``."""
    roles = {component: entry.roles[component] for component in COMPONENTS if component in entry.declared}
    return {component: role for component, role in roles.items() if role != without}


def _entry_text(entry: RoleEntry, named: Mapping[str, str]) -> str:
    fields = [] if entry.elsewhere is None else [f"elsewhere: {entry.elsewhere}"]
    fields += [f"{component}: {role}" for component, role in named.items()]
    if entry.weights is not None:
        fields.append(f"weights: {entry.weights if entry.weights == 'whole' else _names(entry.weights)}")
    if entry.sequence_parallel:
        fields.append("sequence_parallel: true")
    fields += plain_options(entry)
    return str(entry.elsewhere) if fields == [f"elsewhere: {entry.elsewhere}"] else f"{{{', '.join(fields)}}}"


def rule(component: str, logical_axis: str, axes: Iterable[str]) -> Candidate:
    """A rule with the exact axes of one logical axis of a component's weights, in place of the present rule."""
    new = Rule(component=component, logical_axis=logical_axis, axes=tuple(axes))

    def edit(request: Request) -> Request:
        layout = request.layout
        kept = tuple(r for r in layout.rules if (r.component, r.logical_axis) != (component, logical_axis))
        return replace(request, layout=replace(layout, rules=(*kept, new)))

    return Candidate(text=f"rules: {{{component}: {{{logical_axis}: {_names(new.axes)}}}}}", edit=edit)


def without_rule(component: str, logical_axis: str) -> Candidate:
    """One rule removed."""

    def edit(request: Request) -> Request:
        layout = request.layout
        kept = tuple(r for r in layout.rules if (r.component, r.logical_axis) != (component, logical_axis))
        return replace(request, layout=replace(layout, rules=kept))

    return Candidate(text=f"remove the rule for '{logical_axis}' in '{component}'", edit=edit)


def attention_move(option: str) -> Candidate:
    """Another option of context parallelism: ``move: {attention: gather}``."""
    return Candidate(
        text=f"move: {{attention: {option}}}",
        edit=lambda request: replace(request, layout=replace(request.layout, move_attention=option)),
    )


def mesh_order(plan: Plan, axes: Iterable[str]) -> Candidate:
    """The same mesh axes in another order: ``mesh: {data: 1, fsdp: auto, expert: 4}``."""
    order = tuple(axes)
    entries = plan.request.layout.mesh

    def edit(request: Request) -> Request:
        layout = request.layout
        mesh = {axis: layout.mesh[axis] for axis in order}
        return replace(
            request, layout=replace(layout, mesh=mesh, entries={axis: layout.entries[axis] for axis in order})
        )

    return Candidate(text=f"mesh: {{{', '.join(_mesh_entry(axis, entries[axis]) for axis in order)}}}", edit=edit)


def _mesh_entry(axis: str, entry: MeshEntry) -> str:
    return f"{axis}: {entry.size}" if entry.link is None else f"{axis}: {{size: {entry.size}, link: {entry.link}}}"


def _names(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"

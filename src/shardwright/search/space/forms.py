"""The role tables that a search tries, and the orders of their axes.

A form names axes in mesh order, the slowest link first: stages send little, tensor parallelism waits for its links in every layer. Between
these two every order is tried that gives an axis other links (``orders_of``). A layout of a form has those of its axes that are larger than 1.

| form | experts lie on |
|---|---|
| dense | no axis |
| ep, ep-as-dp, ep-as-cp | an axis that outside the experts is fsdp, data or context |
| cp-as-ep | the context axis and an axis that is fsdp outside |
| tp-as-ep | the tensor axis |
| ep-and-tp-as-ep | an axis that is fsdp outside, and the tensor axis |
| ep-over-nodes | two axes, those between nodes and those within |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

from shardwright.core.findings.position import located
from shardwright.core.layout.declaration import declaration
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.hardware.machine import Machine

Entry = str | Mapping[str, Any]

STAGE, DATA, FSDP, CONTEXT = ("stage", "stage"), ("data", "data"), ("fsdp", "fsdp"), ("context", "context")
TENSOR = ("tensor", {"elsewhere": "tensor", "sequence_parallel": True})
EXPERTS_ON_TENSOR = (
    "tensor",
    {"elsewhere": "tensor", "router": "context", "moe": "expert", "sequence_parallel": True},
)


def _experts(outside: str, axis: str = "expert") -> tuple[str, Entry]:
    return axis, {"elsewhere": outside, "moe": "expert"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Axes in mesh order, each with its entry in a layout file."""

    name: str
    axes: tuple[tuple[str, Entry], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.axes)

    def outside(self, axis: str) -> str:
        """The role of an axis outside the experts."""
        entry = dict(self.axes)[axis]
        return entry if isinstance(entry, str) else str(entry["elsewhere"])

    def has_experts(self, axis: str) -> bool:
        """Whether an axis shards the experts."""
        entry = dict(self.axes)[axis]
        return not isinstance(entry, str) and entry.get("moe") == "expert"


DENSE = Form(name="dense", axes=(STAGE, DATA, FSDP, CONTEXT, TENSOR))
"""The form of a model without experts; and of one with experts, whose experts are then sharded as any other weight."""

MIXTURE = (
    DENSE,
    Form(name="ep", axes=(STAGE, DATA, FSDP, _experts("fsdp"), CONTEXT, TENSOR)),
    Form(name="ep-as-dp", axes=(STAGE, DATA, FSDP, _experts("data"), CONTEXT, TENSOR)),
    Form(name="ep-as-cp", axes=(STAGE, DATA, FSDP, _experts("context"), TENSOR)),
    Form(name="cp-as-ep", axes=(STAGE, DATA, FSDP, _experts("context", "context"), _experts("fsdp"), TENSOR)),
    Form(name="tp-as-ep", axes=(STAGE, DATA, FSDP, CONTEXT, EXPERTS_ON_TENSOR)),
    Form(name="ep-and-tp-as-ep", axes=(STAGE, DATA, FSDP, _experts("fsdp"), CONTEXT, EXPERTS_ON_TENSOR)),
    Form(name="ep-over-nodes", axes=(STAGE, DATA, FSDP, _experts("fsdp", "expert_node"), _experts("fsdp"), TENSOR)),
)


def layout_of(form: Form, axes: tuple[str, ...]) -> Layout:
    """The layout that has these axes of a form, in this order. Its name is theirs."""
    entries = dict(form.axes)
    return _layout(tuple((axis, _frozen(entries[axis])) for axis in axes))


@lru_cache(maxsize=1024)
def _layout(entries: tuple[tuple[str, Any], ...]) -> Layout:
    roles = {axis: dict(entry) if isinstance(entry, tuple) else entry for axis, entry in entries}
    *fixed, last = roles
    return read_layout(
        located({"name": "-".join(roles), "mesh": {**dict.fromkeys(fixed, 1), last: "auto"}, "roles": roles})
    )


def orders_of(form: Form, sizes: Mapping[str, int], machine: Machine) -> tuple[Mapping[str, int], ...]:
    """The sizes in each order of axes in which some axis has other links, the form's own first: stages first, tensor parallelism last."""
    fixed_first = [axis for axis in sizes if form.outside(axis) == "stage"]
    fixed_last = [axis for axis in sizes if form.outside(axis) == "tensor"]
    between = [axis for axis in sizes if axis not in (*fixed_first, *fixed_last)]
    orders: dict[object, Mapping[str, int]] = {}
    for order in permutations(between):
        ordered = {axis: sizes[axis] for axis in (*fixed_first, *order, *fixed_last)}
        mesh = Mesh(tuple(Axis(name=axis, size=size) for axis, size in ordered.items()))
        mapping = map_mesh(mesh, machine)
        orders.setdefault(frozenset((axis, mapping.group([axis])) for axis in ordered), ordered)
    return tuple(orders.values())


def form_named(name: str) -> Form:
    return next(form for form in MIXTURE if form.name == name)


def _frozen(entry: Entry) -> Any:
    return entry if isinstance(entry, str) else tuple(entry.items())


def preset_of(layout: Layout, presets: Iterable[Layout]) -> Layout | None:
    """The preset that gives every axis of a layout the same role and the same order, with the fewest other axes; None if there is none. Others are
    replicas or shards, of size 1."""
    wanted = declaration(layout)

    def others(preset: Layout) -> set[str]:
        return set(preset.entries) - set(layout.entries)

    def says_the_same(preset: Layout) -> bool:
        declared = declaration(preset)
        shared = {axis: roles for axis, roles in declared["roles"].items() if axis in wanted["roles"]}
        return list(shared.items()) == list(wanted["roles"].items()) and declared["move"] == wanted["move"]

    able = [preset for preset in presets if others(preset) <= {"data", "fsdp"} and says_the_same(preset)]
    return min(able, key=lambda preset: len(others(preset)), default=None)

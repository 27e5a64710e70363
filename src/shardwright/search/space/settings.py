"""What a search chooses for a layout, and the request that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from math import prod

from shardwright.core.engines.properties import EngineProperties
from shardwright.core.layout.layout import Layout, RoleEntry
from shardwright.core.mesh.divisors import divisors
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.token_hops import TWO_HOPS
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of
from shardwright.search.space.policies import TriedPolicy

STORING = ("fsdp", "context")
"""Roles whose axes shard weights at rest that are gathered for use."""

LOSS_CHUNKS = (1, 8)
"""Chunks of the loss: its logits may be what does not fit."""

MOST_ROUNDS = 16
"""Microbatches of a pipeline are at most so many times its stages: more hardly make the bubble smaller."""

CHUNKS = (1, 2, 4)
"""Chunks of layers of a stage's device."""

BEATEN = frozenset({"gpipe", "looped-bfs"})
"""Schedules that another one always equals or beats."""

PLAIN = frozenset({"circular", "gpipe", "zero-bubble"})
"""Schedules that run with any number of microbatches: of an engine one that gathers weights for each pass, and one that gathers them once a
step, if it has both. One of them has the passes of any other schedule."""


def tried_schedules(engine: EngineProperties) -> tuple[str, ...]:
    return tuple(name for name in engine.schedules if name not in BEATEN)


def plain_schedules(engine: EngineProperties) -> tuple[str, ...]:
    return tuple(name for name in engine.schedules if name in PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The values that are tried of each option; one where it was typed. ``microbatches`` None: those that divide a device's rows.
    ``moves_of_experts`` None: those that suit the axes of experts. ``precisions``: recipes by the name that asks for them."""

    policies: tuple[TriedPolicy, ...]
    microbatches: int | None = None
    loss_chunks: tuple[int, ...] = LOSS_CHUNKS
    schedules: tuple[str, ...] | None = None
    moves_of_attention: tuple[str, ...] = ("gather", "ring", "ulysses")
    moves_of_experts: tuple[str, ...] | None = None
    precisions: Mapping[str, Recipe | None] = field(default_factory=lambda: {"": None})

    def policies_for(self, ranks: int, engine: EngineProperties) -> tuple[TriedPolicy, ...]:
        """Those that an engine runs in a pipeline of so many ranks. Stages of one program have one policy for all layers of a stack, and keep
        nothing on the host."""
        if ranks == 1 or not engine.one_program or len(self.policies) == 1:
            return self.policies
        return tuple(policy for policy in self.policies if policy.in_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of each option for an arrangement. ``virtual``: chunks of layers of a device; ``once``: weights of stages are gathered once a step;
    ``shared_update``: replicas share what the optimizer keeps (ZeRO-1). ``precision``: the name of a recipe; empty: none."""

    remat: str = "none"
    microbatches: int = 1
    loss_chunks: int = 1
    schedule: str | None = None
    virtual: int = 1
    once: bool = False
    shared_update: bool = False
    attention: str = "gather"
    experts: str = "all-to-all"
    precision: str = ""

    def of(self, arrangement: Arrangement, request: Request, precision: Recipe | None) -> Request:
        """The request under an arrangement, with this setting."""
        return replace(
            request,
            layout=self.layout(arrangement),
            mesh_sizes=arrangement.sizes,
            devices=prod(arrangement.sizes.values()),
            remat=self.remat,
            microbatches=self.microbatches,
            loss_chunks=self.loss_chunks,
            schedule=self.schedule,
            precision=precision,
        )

    @property
    def text(self) -> str:
        """Every value that is not the default, as ``remat=dots microbatches=4``."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default)

    def layout(self, arrangement: Arrangement) -> Layout:
        """The arrangement's layout with those of these values that a layout file has: always the same object, whose hash is made once."""
        key = (self.attention, self.experts, self.virtual, self.once, self.shared_update)
        return _layout(arrangement.form, tuple(arrangement.sizes), *key)


@lru_cache(maxsize=4096)
def _layout(
    form: str, axes: tuple[str, ...], attention: str, experts: str, virtual: int, once: bool, shared_update: bool
) -> Layout:
    def changed(entry: RoleEntry) -> RoleEntry:
        if entry.elsewhere == "stage" and virtual > 1:
            return replace(entry, virtual=virtual)
        if entry.elsewhere in STORING and once:
            return replace(entry, keep_gathered=True)
        if entry.elsewhere == "data" and shared_update:
            return replace(entry, optimizer="shard")
        return entry

    layout = layout_of(form_named(form), axes)
    entries = {axis: changed(entry) for axis, entry in layout.entries.items()}
    return replace(layout, entries=entries, move_attention=attention, move_moe=experts)


def settings_of(arrangement: Arrangement, request: Request, free: Free) -> Iterator[Setting]:
    """The settings of an arrangement but for what costs time and gives memory: policies and, without stages, microbatches and chunks of
    the loss. Of stages these have one microbatch and a plain schedule: ``microbatches_in_stages`` and ``schedules_of`` go on from them."""
    roles = {entry.elsewhere for entry in arrangement.layout.entries.values()}
    stages = "stage" in roles
    ways = product(
        free.moves_of_attention if "context" in roles else ("gather",),
        _moves_of_experts(arrangement, request, free),
        free.precisions,
        # Replicas that share an update need less memory, and more messages. The smaller comes first.
        (True, False) if "data" in roles else (False,),
    )
    for attention, experts, precision, shared_update in ways:
        yield Setting(
            attention=attention,
            experts=experts,
            shared_update=shared_update,
            precision=precision,
            # The stages of one program share the chunks of a loss: with them it is faster.
            loss_chunks=free.loss_chunks[-1 if stages and request.properties.one_program else 0],
            microbatches=1 if stages else free.microbatches or 1,
            once=stages and "kept weights in stages" not in request.properties.lacks and not roles.isdisjoint(STORING),
            schedule=plain_schedules(request.properties)[0] if stages else None,
        )


def _moves_of_experts(arrangement: Arrangement, request: Request, free: Free) -> tuple[str, ...]:
    """A ring sends all tokens to every device of the experts, so it is tried over at most as many as a token has experts; two hops are, where
    experts lie on two axes. That weights move is what a form without axes of experts does."""
    layout = arrangement.layout
    axes = [axis for axis in layout.entries if layout.role(axis, "moe") == "expert"]
    if not axes or free.moves_of_experts is not None:
        return free.moves_of_experts or ("all-to-all",)
    ring = prod(arrangement.sizes[axis] for axis in axes) <= (request.table.top_k or 1)
    return ("all-to-all", *(("ring",) if ring else ()), *((TWO_HOPS,) if len(axes) > 1 else ()))


def microbatches_in_stages(
    arrangement: Arrangement, setting: Setting, request: Request, free: Free
) -> Iterator[Setting]:
    """A setting of stages with each number of microbatches from its own on."""
    for microbatches in microbatches_of(arrangement, request, free):
        if setting.microbatches <= microbatches <= MOST_ROUNDS * arrangement.sizes["stage"]:
            yield replace(setting, microbatches=microbatches)


def schedules_of(arrangement: Arrangement, setting: Setting, request: Request, free: Free) -> Iterator[Setting]:
    """A setting of stages with each schedule, number of chunks of layers and of the loss that run with its microbatches."""
    ranks = arrangement.sizes["stage"]
    for name in free.schedules or tried_schedules(request.properties):
        schedule = SCHEDULES[name]
        for virtual in CHUNKS if schedule.virtual is None else (schedule.virtual,):
            if ranks * virtual > request.table.num_layers or (name == "interleaved" and virtual == 1):
                continue
            if schedule.runs(ranks, virtual, setting.microbatches):
                for chunks in free.loss_chunks:
                    yield replace(setting, schedule=name, virtual=virtual, loss_chunks=chunks)


def microbatches_of(arrangement: Arrangement, request: Request, free: Free) -> tuple[int, ...]:
    """The numbers of microbatches into which the rows of a device divide, the fewest first."""
    if free.microbatches is not None:
        return (free.microbatches,)
    entries = arrangement.layout.entries
    shards = prod(size for axis, size in arrangement.sizes.items() if entries[axis].elsewhere in ("data", "fsdp"))
    return tuple(divisors(request.batch // shards))

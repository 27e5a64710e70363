"""Every candidate of a search on a small machine, priced without its bounds and without what it leaves out by rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from random import Random

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.cost.advice import priced_request
from shardwright.cost.steps.step import HOST_RATE
from shardwright.search.solving import Node, Solver
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of
from shardwright.search.space.policies import policies_of
from shardwright.search.space.settings import CHUNKS, LOSS_CHUNKS, STORING, Free, Setting, microbatches_of, settings_of
from shardwright.search.space.space import space_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model on a machine of few devices. ``memory``: the share of what its candidates need between the smallest and the largest that a device
    has; None: all of its chip's."""

    model: str
    chips: str
    engine: str = "jax"
    batch: int = 8
    memory: float | None = None

    def __str__(self) -> str:
        return "-".join([self.model, self.chips, self.engine, *([] if self.memory is None else [str(self.memory)])])

    def solver(self, random: Random) -> Solver:
        typed = typed_request(
            self.model, "fsdp", PlanOptions(chips=self.chips, batch=self.batch, engine=self.engine, length=128)
        )
        assert typed.machine is not None
        assert typed.machine.numbers is not None
        policies = policies_of(typed.request.table, to_host=HOST_RATE in typed.machine.numbers.numbers)
        solver = Solver(request=typed.request, machine=typed.machine, free=Free(policies=policies))
        return solver if self.memory is None else with_memory(solver, self._memory_bytes(solver, random))

    def _memory_bytes(self, solver: Solver, random: Random) -> int:
        arrangements = random.sample(space_of(solver.request, solver.machine).arrangements, k=8)
        nodes = [random.choice(list(candidates_of(arrangement, solver))) for arrangement in arrangements]
        held = sorted(price.bytes_per_device for node in nodes if (price := priced(solver, node)) is not None)
        assert self.memory is not None
        return round(held[0] + (held[-1] - held[0]) * self.memory)


def with_memory(solver: Solver, usable_bytes: int) -> Solver:
    assert solver.request.chip is not None
    return replace(
        solver, request=replace(solver.request, chip=replace(solver.request.chip, usable_bytes=usable_bytes))
    )


def with_policies(solver: Solver, random: Random, number: int) -> Solver:
    """The first and the last two policies, and some between."""
    first, *between, before, last = solver.free.policies
    some = random.sample(between, k=number - 3)
    policies = (first, *(policy for policy in between if policy in some), before, last)
    names = {policy.text for policy in policies}
    kept = (replace(policy, less=tuple(text for text in policy.less if text in names)) for policy in policies)
    return replace(solver, free=replace(solver.free, policies=tuple(kept)))


def priced(solver: Solver, node: Node):
    try:
        return priced_request(solver.requested(node), solver.machine)
    except (FindingsError, InputError):
        return None


def candidates(
    solver: Solver, arrangements: Iterable[Arrangement], *, every_order: bool
) -> Iterator[tuple[Arrangement, Node]]:
    """Every candidate, beside the arrangement that it is of, with its own seconds, that fits."""
    for arrangement in arrangements:
        for ordered in in_every_order(arrangement) if every_order else [arrangement]:
            for node in candidates_of(ordered, solver):
                price = priced(solver, node)
                if price is not None and price.seconds is not None and price.bytes_per_device <= solver.limit_bytes:
                    yield arrangement, replace(node, seconds=price.seconds, bytes_per_device=price.bytes_per_device)


def in_every_order(arrangement: Arrangement) -> Iterator[Arrangement]:
    form = form_named(arrangement.form)
    for order in permutations(arrangement.sizes):
        sizes = {axis: arrangement.sizes[axis] for axis in order}
        yield replace(arrangement, layout=layout_of(form, tuple(sizes)), sizes=sizes)


def candidates_of(arrangement: Arrangement, solver: Solver) -> Iterator[Node]:
    request, free = solver.request, solver.free
    roles = {entry.elsewhere for entry in arrangement.layout.entries.values()}
    stages = "stage" in roles
    rows = product(
        dict.fromkeys(replace(setting, loss_chunks=1) for setting in settings_of(arrangement, request, free)),
        free.policies,
        microbatches_of(arrangement, request, free),
        LOSS_CHUNKS,
        (True, False) if "data" in roles else (False,),
        (True, False) if stages and not roles.isdisjoint(STORING) else (False,),
        product(SCHEDULES, CHUNKS) if stages else [(None, 1)],
    )
    settings: dict[Setting, None] = {}
    for setting, policy, microbatches, chunks, shared, once, (schedule, virtual) in rows:
        # Chunks without a layer are no part of the space.
        if schedule is not None and (
            arrangement.sizes["stage"] * virtual > request.table.num_layers
            or not SCHEDULES[schedule].runs(arrangement.sizes["stage"], virtual, microbatches)
        ):
            continue
        changed = replace(
            setting,
            remat=policy.text,
            microbatches=microbatches,
            loss_chunks=chunks,
            shared_update=shared,
            once=once,
            schedule=schedule,
            virtual=virtual,
        )
        settings[changed] = None
    for setting in settings:
        yield Node(arrangement=arrangement, setting=setting, level="choice", seconds=0.0)


def fastest(solver: Solver, nodes: Sequence[Node], below_s: float) -> Node | None:
    """The fastest candidate without an error that is faster than some seconds."""
    faster = sorted((node for node in nodes if node.seconds < below_s), key=lambda node: node.key)
    return next((node for node in faster if not solver.errors(node)), None)

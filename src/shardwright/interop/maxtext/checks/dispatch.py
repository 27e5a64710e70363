"""SW102 where it decides the communication: the rows of dispatched tokens have the axis that shards the experts.

That axis shards the experts' weights and also the tokens' rows, so the experts' dim of the tokens is unsharded. Each device then
gathers the weights of all experts, where it could have sent its tokens to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, product
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy, in_place, without
from shardwright.interop.maxtext.reading.rules import Rule
from shardwright.interop.maxtext.resolution.placement import Imported, Placed, placed_under
from shardwright.interop.maxtext.resolution.tensors import DTYPE_BYTES

EXPERTS, ROWS = "activation_exp", "activation_batch_moe"


def dispatched_by_batch(imported: Imported) -> Iterator[Drafted]:
    """The axes that shard the experts' weights and the rows of the tensor dispatched to them."""
    placed = imported.activation("moe.dispatched") or _as_if_with_capacity(imported)
    if placed is None:
        return
    weights = [each for each in imported.weights if each.tensor.component == "moe"]
    held = dict.fromkeys(axis for each in weights for axis in each.axes_of("experts"))
    rows, experts = placed.axes_of("batch"), placed.axes_of("experts")
    named = {axis for line in imported.rules if line.name == EXPERTS for axis in line.axes}
    # Where the experts' dim has axes, the other axes of the weights are for storage, unless a rule gives them to it too.
    lost = tuple(a for a in held if a in rows and a not in experts and (a in named or not experts))
    if lost:
        yield Draft(finding=_finding(imported, placed, weights, lost), candidates=(_flag(), *_reordered(imported)))


def _as_if_with_capacity(imported: Imported) -> Placed | None:
    """The dispatched tensor of a configuration that sets another MoE path: its rules have the same fault."""
    if imported.table.top_k is None or imported.step.path is None:
        return None
    step = replace(imported.step, path="capacity")
    other = placed_under(imported.configuration, imported.mesh, imported.table, step, imported.dialect)
    return other.activation("moe.dispatched")


def _finding(imported: Imported, placed: Placed, weights: list[Placed], lost: tuple[str, ...]) -> Finding:
    mesh = imported.mesh
    winner = placed.applied[1]
    assert winner is not None
    loser = next((line for line in imported.rules if line.name == EXPERTS and set(lost) & set(line.axes)), None)
    used = imported.step.path in (None, "capacity")
    gathered, sent = _gathered(imported, weights), _sent(imported, placed)
    axes = " and ".join(f"'{axis}'" for axis in lost)
    why = (
        f"the rule for '{EXPERTS}' ({loser.line}) is later and is skipped"
        if loser
        else f"no rule for '{EXPERTS}' has it"
    )
    unused = "" if used else f"; the file sets the {imported.step.path} path, which has no such tensor"
    cheaper = "weights" if gathered <= sent else "tokens"
    return Finding(
        code="SW102",
        severity="error" if used and cheaper == "tokens" else "info" if not used else "warning",
        tensor=placed.tensor.name,
        where=f"axis {axes} of {placed.tensor.name}, the tokens dispatched to experts",
        position=winner.position,
        notation=placed.notation,
        mark=placed.mark(0),
        found=f"'{winner.name}' ({winner.line}) gives {axes} to its rows, and {why}: the experts' dim is unsharded, "
        f"where their weights are sharded over {product(mesh, lost)}{unused}",
        needed=f"{axes} on '{EXPERTS}', so that tokens are sent to the experts",
        cost=f"each layer and pass gathers {bytes_text(gathered)} of experts' weights on each device; sending its tokens to the "
        f"experts and back is {bytes_text(sent)} ({cheaper} are fewer bytes)",
    )


def _gathered(imported: Imported, weights: list[Placed]) -> float:
    """Bytes of one layer's experts on a device after the all-gather over the axes of their experts, in the compute dtype."""
    stack_of = {weight.name: weight.stack for weight in imported.table.weights}
    stack = stack_of[weights[0].tensor.name]
    itemsize = DTYPE_BYTES[imported.step.dtype]
    return sum(
        prod(each.tensor.shape[1:]) * itemsize / imported.mesh.size(each.axes_of("mlp"))
        for each in weights
        if stack_of[each.tensor.name] == stack
    )


def _sent(imported: Imported, placed: Placed) -> float:
    """Bytes of one layer's dispatched tokens of a device, sent to the experts and back."""
    one_way = prod(placed.tensor.shape) * placed.tensor.itemsize / imported.mesh.size(placed.axes)
    return 2 * one_way


def _flag() -> Remedy:
    return Candidate(
        text="Write 'moe_dispatch_no_expert_sharding: true'.",
        edit=lambda i: placed_under(i.configuration, i.mesh, i.table, replace(i.step, peel=True), i.dialect),
    )


def _reordered(imported: Imported) -> Iterator[Remedy]:
    """The experts' rule first, and a second rule for the rows without its axes. Masks use the first, dispatched tokens fall back to it."""
    experts = [line for line in imported.rules if line.name == EXPERTS]
    rows = [line for line in imported.rules if line.name == ROWS]
    if experts and rows:
        taken = {axis for line in experts for axis in line.axes}
        narrow = Rule(name=ROWS, axes=tuple(a for a in rows[0].axes if a not in taken), position=rows[0].position)
        lines = [*experts, *rows, narrow]
        yield Candidate(
            text=f"Write '{experts[0]}' above line {rows[0].position.line}, and '{narrow}' below it.",
            edit=lambda i: i.under(in_place(without(i.rules, EXPERTS), ROWS, *lines)),
        )

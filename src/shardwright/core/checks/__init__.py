"""Checks of an entire plan. Each file holds one group; each check is a generator of drafts.

tensors.py        properties of tensors that several checks use
edits.py          changes of a request that may fix a finding
replicas.py       SW101: replicated weights and activations
two_dims.py       SW102: one axis on two dims
idle.py           SW103: an axis that shards nothing
units.py          SW104, SW107: dims that their axes do not divide
fused.py          SW107: several matrices in one dim
choices.py        SW105: what `auto` chose
rows.py           SW108: rows and tokens over their axes
loss.py           SW125: chunks of the loss
stages.py         SW110: layers and microbatches over stages
unused.py         SW111: names that no tensor has
storage.py        SW114, SW118: the storage dim
strides.py        SW117: a mesh order that separates neighbours
pays.py           SW121: whether a layout pays
updates.py        SW124: updates that are not sharded
balance.py        SW122: load balancing without effect
gathered.py       SW122: weights kept gathered without effect
hops.py           SW122: ways over an entire slice without effect
token_hops.py     SW122: two hops of tokens over one axis
memory.py         SW312: the memory of a device
low_precision.py  SW404, SW416, SW417: a recipe of low precision under the layout, and on the chip
expert_buffer.py  SW405: dropped tokens and the expert buffer
engines.py        SW415: what an engine does not run
engine_stages.py  SW415 of pipelines
engine_policies.py  SW415 of policies of recomputation
engine_recipes.py  SW415 of recipes of low precision
window.py         SW415 of rows beyond a window of attention
training_only.py  SW123: what a model says of its training alone, and no engine computes

A draft has candidates for a fix. ``check`` prints the first candidate that works: it plans the changed request, runs the
checks again, and accepts the candidate if the finding is gone, or is only information, and no error is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shardwright.core.checks.balance import balance
from shardwright.core.checks.choices import choices
from shardwright.core.checks.engines import not_run
from shardwright.core.checks.expert_buffer import expert_buffer
from shardwright.core.checks.fused import fused_matrices
from shardwright.core.checks.gathered import kept_for_nothing
from shardwright.core.checks.hops import hops_without_effect
from shardwright.core.checks.idle import idle_axes
from shardwright.core.checks.loss import loss_chunks
from shardwright.core.checks.low_precision import blocks_split, dequantized, moved_by_the_layout
from shardwright.core.checks.memory import memory
from shardwright.core.checks.pays import pays, rows_instead
from shardwright.core.checks.replicas import replicated_activations, replicated_weights
from shardwright.core.checks.rows import rows_and_tokens
from shardwright.core.checks.stages import stages
from shardwright.core.checks.storage import another_dim, too_small
from shardwright.core.checks.strides import strides
from shardwright.core.checks.token_hops import hops_of_one_axis
from shardwright.core.checks.training_only import training_only
from shardwright.core.checks.two_dims import two_dims
from shardwright.core.checks.units import padded, split_units
from shardwright.core.checks.unused import unused
from shardwright.core.checks.updates import updates
from shardwright.core.findings.draft import Candidate, Draft, Key
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.findings.position import located
from shardwright.core.layout.declaration import declaration
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.mesh_sizes import fixes, mesh_faults
from shardwright.core.resolution.request import Request

CHECKS: tuple[Callable[[Plan], Iterator[Draft]], ...] = (
    replicated_weights,
    replicated_activations,
    two_dims,
    idle_axes,
    padded,
    choices,
    expert_buffer,
    split_units,
    fused_matrices,
    rows_and_tokens,
    loss_chunks,
    balance,
    stages,
    unused,
    too_small,
    strides,
    another_dim,
    updates,
    kept_for_nothing,
    hops_without_effect,
    hops_of_one_axis,
    pays,
    rows_instead,
    memory,
    moved_by_the_layout,
    blocks_split,
    dequantized,
    not_run,
    training_only,
)


def drafts(plan: Plan) -> tuple[Draft, ...]:
    """Every finding about a plan, before its fix is chosen."""
    return tuple(draft for one in CHECKS for draft in one(plan))


def _of_tried(plan: Plan) -> tuple[Draft, ...]:
    """Those that decide about a fix: without the statement of what a layout is for, whose numbers take the longest."""
    return tuple(draft for one in CHECKS if one is not pays for draft in one(plan))


def check_mesh(request: Request, resolve: Callable[[Request], Plan]) -> None:
    """Raise FindingsError where there is no mesh. The fix is the first candidate that gives a mesh and a plan without errors."""
    faults = mesh_faults(request)
    if faults:
        raise FindingsError([_settled_mesh(fault, request, resolve) for fault in faults])


def _settled_mesh(fault: Draft, request: Request, resolve: Callable[[Request], Plan]) -> Finding:
    able = [candidate for candidate in fault.candidates if fixes(fault, candidate, request)]
    for candidate in able:
        changed = candidate.edit(request)
        if not mesh_faults(changed) and not _errors(_of_tried(resolve(changed))):
            return replace(fault.finding, fix=candidate.text)
    return replace(fault, candidates=tuple(able)).settled(lambda _: True)


def check(plan: Plan, resolve: Callable[[Request], Plan]) -> tuple[Finding, ...]:
    """Every finding about a plan, errors first; ``resolve`` plans a changed request, to try a fix."""
    found = drafts(plan)
    ends = trials(plan, found, resolve)
    return worst_first(draft.settled(lambda candidate, d=draft: ends(d, candidate)) for draft in found)


def trials(
    plan: Plan, found: Iterable[Draft], resolve: Callable[[Request], Plan]
) -> Callable[[Draft, Candidate], bool]:
    """Says whether a candidate ends a finding, and no error is new. ``found``: the drafts of the plan. Each candidate is planned once."""
    errors = _errors(found)
    tried: dict[str, dict[Key, Draft] | None] = {}

    def ends(draft: Draft, candidate: Candidate) -> bool:
        if candidate.text not in tried:
            tried[candidate.text] = _after(candidate, plan, resolve)
        after = tried[candidate.text]
        if after is None:
            return False
        left = after.get(draft.key)
        fixed = left is None or (left.finding.severity == "info" != draft.finding.severity)
        return fixed and _errors(after.values()) <= errors

    return ends


def _errors(found: Iterable[Draft]) -> set[Key]:
    return {draft.key for draft in found if draft.finding.severity == "error"}


def _after(candidate: Candidate, plan: Plan, resolve: Callable[[Request], Plan]) -> dict[Key, Draft] | None:
    """The drafts of the changed request; None where there can be no plan of it, as with a size that is too large, or its layout could not be read from a file."""
    try:
        request = candidate.edit(plan.request)
        if request.layout is not plan.request.layout:
            read_layout(located(declaration(request.layout)))
        changed = resolve(request)
    except (FindingsError, InputError):
        return None
    return {draft.key: draft for draft in _of_tried(changed)}

"""SW122: a way of `--hops` where nothing is gathered over an entire slice, or where it stays one collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.checks.edits import option
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import product
from shardwright.core.mesh.hops import AUTO, ONE, WholeSlice
from shardwright.core.plan.collectives import step_collectives
from shardwright.core.plan.plan import Plan, PlannedCollective


def hops_without_effect(plan: Plan) -> Iterator[Draft]:
    """Information where a way is given of collectives over an entire slice, and there is none, or none can go that way."""
    way, whole = plan.request.hops, plan.mesh.whole_slice
    if way == AUTO:
        return
    over_all = [] if whole is None else _over_all(plan, whole)
    if whole is None or not over_all:
        found = (
            "no gather or scatter is over an entire TPU slice of a size at which its compiler makes an all-reduce of it"
        )
        needed = "an axis, or several, over all chips of such a slice, as fsdp 128 on v5p:4x4x8"
    elif way != "one" and any(one.compiled_as for one in plan.collectives):
        shape = " x ".join(map(str, whole.dims))
        if whole.route:
            axes = next(one.axes for one in plan.collectives if one.compiled_as)
            found = f"{product(plan.mesh, axes)} do not take entire dims of {shape} devices, and stay one collective"
            needed = (
                "mesh axes over entire dims of the torus, in the order of the mesh, the last axis over the last dim"
            )
        else:
            found = f"{shape} devices have one dim of more than one, and a collective over them stays one"
            needed = "a torus with two dims or more, of which one is taken after the other"
    else:
        return
    finding = Finding(code="SW122", severity="info", where=f"--hops {way}", found=found, needed=needed)
    yield Draft(finding=finding, candidates=(option("hops", AUTO),))


def _over_all(plan: Plan, whole: WholeSlice) -> list[PlannedCollective]:
    """What would be compiled to an all-reduce, were every collective one."""
    mesh = replace(plan.mesh, whole_slice=replace(whole, route=ONE))
    return [one for one in step_collectives(plan.request, mesh, plan.tensors, plan.quantized) if one.compiled_as]

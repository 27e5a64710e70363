"""SW110: pipeline stages against the number of layers and of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardwright.core.checks.edits import both, option, resized
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, either, percent, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan, TensorPlan


def stages(plan: Plan) -> Iterator[Draft]:
    """Each stack of layers that the stages do not divide, and fewer microbatches than stages."""
    stacked = [t for t in plan.weights if len(t.spec.dims) > len(t.shape)]
    axes = plan.mesh.larger_than_one({a: None for t in stacked for a in t.spec.dims[0].axes})
    if not axes:
        return
    num_stages = plan.mesh.size(axes)
    first = {tensor.num: tensor for tensor in reversed(stacked)}
    common = gcd(*first)
    for num, tensor in sorted(first.items()):
        if num % num_stages:
            yield _uneven(plan, axes, num, tensor, common)
    microbatches = plan.request.microbatches
    if microbatches < num_stages:
        readers = plan.mesh.size(plan.dp)
        # Numbers that leave a device without a row need not be planned.
        filling = [
            number
            for number in (4 * num_stages, 2 * num_stages, num_stages)
            if plan.request.batch % (readers * number) == 0
        ]
        yield Draft(
            finding=Finding(
                code="SW110",
                severity="warning",
                where=f"microbatches under layout '{plan.request.layout.name}'",
                position=plan.request.layout.entries[axes[0]].position,
                found=f"{count(microbatches, 'microbatch')} for {product(plan.mesh, axes)}",
                needed=f"at least {num_stages} microbatches, one for each stage",
                cost=f"stages are idle for {percent((num_stages - 1) / (microbatches + num_stages - 1))} of the time",
            ),
            candidates=(
                *(option("microbatches", number) for number in filling),
                both(option("batch", readers * num_stages), option("microbatches", num_stages)),
            ),
        )


def _uneven(plan: Plan, axes: tuple[str, ...], num: int, tensor: TensorPlan, common: int) -> Draft:
    num_stages = plan.mesh.size(axes)
    legal = [size for size in divisors(common) if size < num_stages]
    return Draft(
        finding=Finding(
            code="SW110",
            severity="error",
            tensor=tensor.name,
            where=f"layers of {tensor.name}",
            notation=str(tensor.spec),
            mark=place_in(tensor.spec, 0),
            found=f"{count(num, 'layer')} over {product(plan.mesh, axes)}",
            needed=f"stages that divide every stack of layers: {either(divisors(common))}",
            cost=f"the fullest stage would have {-(-num // num_stages)} of these layers; an even share is {num / num_stages:.3g}",
        ),
        candidates=tuple(c for size in reversed(legal) for c in resized(plan, axes[0], size)),
    )

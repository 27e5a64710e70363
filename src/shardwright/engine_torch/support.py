"""What this engine does not run, said before anything is allocated."""

from __future__ import annotations

from shardwright.core.crossing import weight_ways
from shardwright.core.errors import InputError
from shardwright.core.plan import Plan
from shardwright.core.together import weights_of
from shardwright.core.unsupported import require_no_stages, require_slices


def require_support(plan: Plan) -> None:
    """Raises InputError for a plan that this engine does not lower, with what to use in its place."""
    require_no_stages(plan)
    require_slices(plan)
    _require_one_way(plan)
    _require_first_dim(plan)


def _require_one_way(plan: Plan) -> None:
    """A weight that has two uses is gathered once, and so must be the same thing in both."""
    for row in plan.weights:
        own, *others = weight_ways(plan.request, plan.mesh, row).items()
        for component, way in others:
            if (way.whole, way.part, way.alone) != (own[1].whole, own[1].part, own[1].alone):
                raise InputError(
                    f"layout '{plan.request.layout.name}': '{row.name}' is used in '{own[0]}' as {own[1].part} and in "
                    f"'{component}' as {way.part}, and PyTorch gathers a weight once for both. Give the axes of the mesh "
                    f"one role in both components, or train it on JAX."
                )


def _require_first_dim(plan: Plan) -> None:
    """``fully_shard`` cuts dim 0, over all axes that a weight is gathered over as one."""
    for one in weights_of(plan):
        for axis in one.gathered:
            dim = one.at_rest.dim_of(axis)
            if dim:
                raise InputError(
                    f"layout '{plan.request.layout.name}': '{axis}' stores '{one.weight}' on '"
                    f"{one.at_rest.dims[dim].logical_axis}', its dim {dim} as PyTorch keeps it ({one.at_rest}), and "
                    f"fully_shard cuts dim 0, '{one.at_rest.dims[0].logical_axis}'. Leave that dim out of the entry's "
                    f"'weights:' and of 'rules:', or train it on JAX."
                )

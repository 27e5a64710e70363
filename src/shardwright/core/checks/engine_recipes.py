"""SW415 of recipes of low precision, which are planned, compared and locked before an engine quantizes by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.core.checks.edits import both, of_recipe, option, other_recipe, without
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import every
from shardwright.core.model.names import TensorNames
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.dispatch import sent_rows, unlike_a_row
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.recipes.delayed import is_computed
from shardwright.core.recipes.recipe import Recipe

QUANTIZES = ("mxfp8", "fp8-block", "fp8-row", "fp8-delayed", "fp8-current", "nvfp4")
"""Recipes by which both engines quantize: the fixes of one by which they do not."""


def recipes(plan: Plan) -> Iterator[Draft]:
    """What the engine does not run of the recipe of a plan."""
    recipe, engine = plan.request.precision, plan.request.properties
    if recipe is None:
        return
    quantizers = recipe.quantizers.values()
    missing = {
        "delayed amaxes of blocks, or with scales in powers of two": any(
            one.amax == "delayed" and not is_computed(one) for one in quantizers
        ),
        "delayed amaxes of one tensor in two formats": _in_two_formats(plan),
        "histories that differ from device to device": (
            recipe.history is not None and not recipe.reduce_amax and plan.mesh.num_devices > 1
        ),
        "random numbers that each device draws": (
            not recipe.counter_based and any(one.rounding == "stochastic" for one in quantizers)
        ),
        "a Hadamard transform of another product than the weight gradient": any(
            one.hadamard is not None and product != "weight_gradient" for (product, _), one in recipe.quantizers.items()
        ),
        **_gathers(plan),
        **_dispatch(recipe, plan.request.table.names),
        **_rests(plan),
        "the router's products": any(weight.component == "router" for weight in plan.quantized),
        "products of your own program": plan.request.table.owner != "ours",
    }
    found = [what for what, has in missing.items() if has]
    if not found:
        return
    finding = Finding(
        code=NOT_RUN,
        severity="error",
        where="--precision",
        found=f"recipe '{recipe.name}' has {every(found)}, which {engine.title} does not run yet",
        needed="a recipe without that, or none",
    )
    reducing = () if recipe.reduce_amax else (of_recipe(plan, reduce_amax=True),)
    counting = () if recipe.counter_based else (of_recipe(plan, counter_based=True),)
    dispatching = (of_recipe(plan, dispatch_quantized=False),) if recipe.dispatch_quantized else ()
    resting = ()
    if recipe.rest_quantized:
        mastered = option("master-dtype", "float32")
        if plan.request.weights_dtype == "float32":
            mastered = both(option("weights-dtype", "bfloat16"), mastered)
        resting = (mastered, of_recipe(plan, rest_quantized=False))
    fixes = (*resting, *reducing, *counting, *dispatching, *map(other_recipe, QUANTIZES), without("precision"))
    yield Draft(finding=finding, candidates=fixes)


def _in_two_formats(plan: Plan) -> bool:
    """Whether operands that share an amax have different formats: they have one factor."""
    formats: dict[tuple[str, ...], set[str]] = {}
    for weight in plan.quantized:
        for one in weight.operands:
            if one.quantizer.amax == "delayed":
                formats.setdefault(one.same_amax, set()).add(one.quantizer.dtype)
    return any(len(found) > 1 for found in formats.values())


def _gathers(plan: Plan) -> Mapping[str, bool]:
    """Codes are gathered of what is quantized from its own values to the nearest code, in runs along merged dims."""
    copies = [(weight, copy) for weight in plan.quantized for copy in weight.copies]
    quantizers = [copy.quantizer for _, copy in copies if copy.quantizer is not None]
    minor = [name for weight, _ in copies for name in weight.minor_dims]
    return {
        "delayed amaxes of experts whose codes a device gathers and does not multiply": any(
            _keeps_other_experts(weight)
            for weight, copy in copies
            if copy.quantizer and copy.quantizer.amax == "delayed"
        ),
        "gathers of codes that are rounded at random": any(
            one.rounding == "stochastic" or one.hadamard is not None for one in quantizers
        ),
        f"gathers of codes along '{next(iter(minor), '')}', which is no first dim of its side": bool(minor),
    }


def _keeps_other_experts(weight: QuantizedWeight) -> bool:
    """Whether a device has at rest experts that it does not compute: it keeps no factors of these."""
    at_rest = next(array.at_rest for copy in weight.copies for array in copy.arrays[:1])
    return weight.expert_axes != at_rest.axes_of("experts")[: len(weight.expert_axes)]


def _dispatch(recipe: Recipe, names: TensorNames) -> Mapping[str, bool]:
    """Tokens are sent as codes of one row each."""
    tokens = recipe.quantizers.get(("output", "input"))
    if not recipe.dispatch_quantized or sent_rows(recipe, names).tokens is not None:
        return {}
    return {
        "tokens dispatched as codes, and "
        + ("inputs that are not quantized" if tokens is None else unlike_a_row(tokens)): True
    }


def _rests(plan: Plan) -> Mapping[str, bool]:
    """Codes at rest follow from master weights; a stack has one form for all of its layers."""
    request, layout, mesh, lacks = plan.request, plan.request.layout, plan.mesh, plan.request.properties.lacks
    resting = [(one, plan.by_name[one.name]) for one in plan.quantized if one.rests]
    stages = any("stage" in layout.entries[a].roles.values() for a in mesh.larger_than_one(mesh.names))
    ungathered = [row.name for one, row in resting if not any(copy.is_sent for copy in one.copies)]
    return {
        "weights that rest as codes without '--master-dtype float32'": bool(resting) and request.master_dtype is None,
        "weights that rest as codes beside pipeline stages": (
            bool(resting) and stages and "codes at rest in stages" in lacks
        ),
        "weights that rest as codes with delayed amaxes": any(
            copy.quantizer is not None and copy.quantizer.amax == "delayed" for one, _ in resting for copy in one.copies
        ),
        "weights that rest as codes and stay high in their last layers": any(one.num < row.num for one, row in resting),
        "weights that rest as codes and are multiplied as they are": any(
            copy.quantizer is None for one, _ in resting for copy in one.copies
        ),
        "weights that rest as codes and are gathered over no axis": (
            bool(ungathered) and "codes at rest on all devices" in lacks
        ),
    }

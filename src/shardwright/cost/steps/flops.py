"""Flops of one device in a step: matrix products, counted from the table.

| what | forward flops, summed over devices |
|---|---|
| a weight of two or more dims that tokens pass through | 2 x elements x tokens |
| an expert weight | the same x top_k / experts: the experts that a token is sent to, not the capacity of the buffers |
| attention: scores and their product with values | 2 x batch x length x length x heads x (head_dim of keys + that of values), without a saving for causality |
| an embedding, a norm, a bias | 0 |

Backward is twice forward (PaLM, arXiv:2204.02311, appendix B). Recomputed is what the backward pass makes again of what the policy
does not keep (``core/policies/runs.py``): under ``full`` every layer once more, except the last product of the layer; under ``dots``
attention and experts. The axes that shard
the tokens or the weight divide the work between their devices; every other axis repeats it. Keys and values that are
computed from a gathered latent are computed on every device of the axes that shard the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Weight, of_one_layer
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.plan import Phase, Plan, TensorPlan
from shardwright.core.policies.repeated import share_again, share_made_again
from shardwright.core.recipes.recipe import Product
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import operand_spec
from shardwright.core.stages.units import total, units_of

Work = Mapping[tuple[str, Phase], float]
"""Flops of one device in a step, by component and phase."""

TERA = 1e12

KEYS_OF_A_LATENT = {"kv_lora", "heads"}


class CountedProduct(NamedTuple):
    """A product of a device in a step. ``weight``: the one that is multiplied; None for attention scores."""

    component: str
    phase: Phase
    flops: float
    product: Product
    weight: str | None


def step_flops(plan: Plan) -> Work:
    """Flops of one device in a step. Exact for the products above; nothing else is counted."""
    work: dict[tuple[str, Phase], float] = {}
    for one in step_products(plan):
        work[one.component, one.phase] = work.get((one.component, one.phase), 0.0) + one.flops
    return work


def model_flops(request: Request) -> float:
    """Flops of a step on all devices in the forward pass and the backward pass, without what is recomputed: the convention of PaLM
    (arXiv:2204.02311, appendix B), by which MFU is counted."""
    units = units_of(request.table, request.length, recomputed=False)
    return total(units) * request.batch * request.length


def step_products(plan: Plan) -> Iterator[CountedProduct]:
    """Every product of a step: of the forward pass, recomputed (none of its flops, if it is not), and the two of the backward pass."""
    for component, forward, again, weight in _products(plan):
        yield CountedProduct(component, "forward", forward, "output", weight)
        yield CountedProduct(component, "recompute", forward * again, "output", weight)
        yield CountedProduct(component, "backward", forward, "input_gradient", weight)
        yield CountedProduct(component, "backward", forward, "weight_gradient", weight)


def update_bytes(plan: Plan) -> int:
    """Bytes that the optimizer moves on one device: what is kept between steps is read and written, gradients read."""
    memory = plan.memory
    return 2 * memory.state_bytes + memory.gradients_bytes


def _products(plan: Plan) -> Iterator[tuple[str, float, float, str | None]]:
    """Component, forward flops on one device, the share that is recomputed for the backward pass, and the weight."""
    request, runs = plan.request, kept_runs(plan.request, plan.mesh, plan.tensors)
    for weight, tensor in zip(request.table.weights, plan.weights, strict=True):
        again = share_again(request.table, runs, weight)
        for component in _components(weight):
            yield component, _of_weight(plan, weight, tensor, component), again, weight.name
    scores = _of_scores(plan)
    if scores:
        yield "attention", scores, share_made_again(runs, request.table.names.attended), None


def _components(weight: Weight) -> Iterable[str]:
    """The components that multiply by a weight. An embedding is looked up: it multiplies only where it is used again."""
    if len(weight.shape) < 2:
        return ()
    own = () if weight.component == "embedding" else (weight.component,)
    return (*own, *weight.uses)


def _of_weight(plan: Plan, weight: Weight, tensor: TensorPlan, component: str) -> float:
    table, layout = plan.request.table, plan.request.layout
    tokens = plan.sizes["batch"] * plan.sizes["length"]
    chosen = table.top_k / weight.size("experts") if table.top_k and "experts" in weight.logical_axes else 1.0
    keys = plan.by_name.get(table.names.keys_attended)
    axes = _axes_of_product(
        of_one_layer(weight), tensor.in_use, component, layout, plan.mesh.outline, keys and keys.in_use
    )
    return 2 * weight.num_parameters * tokens * chosen / plan.mesh.size(axes)


@lru_cache(maxsize=4096)
def _axes_of_product(
    weight: Weight, in_use: Spec, component: str, layout: Layout, mesh: Mesh, keys: Spec | None
) -> frozenset[str]:
    """The axes among whose devices the products of tokens with a weight are divided. ``keys``: the spec of those that are attended to."""
    sharding_axes = {axis for name in ("batch", "length", "groups") for axis in layout.axes_sharding(name, component)}
    if set(weight.logical_axes) >= KEYS_OF_A_LATENT:
        # Computed where they are attended to: for a device's own heads, from all tokens that it gathers or receives.
        sharding_axes = set(keys.axes if keys else layout.axes_sharding("batch", component))
    operand = operand_spec(in_use, component, layout, mesh)
    return frozenset(sharding_axes).union(operand.axes)


def _of_scores(plan: Plan) -> float:
    rows, of_model = plan.by_name, plan.request.table.names
    names = (of_model.queries, of_model.keys_attended, of_model.values_attended)
    if not all(name in rows for name in names):
        return 0.0
    queries, keys, values = (_sizes(rows[name]) for name in names)
    queries_plan = rows[of_model.queries]
    stages = plan.request.layout.axes_with("stage", "attention")
    widths = keys["head_dim"] + values["head_dim"]
    pairs = prod((queries["batch"], queries["length"], keys["kv_length"], queries["heads"]))
    return 2 * pairs * widths * queries_plan.num / plan.mesh.size({*queries_plan.in_use.axes, *stages})


def _sizes(tensor: TensorPlan) -> Mapping[str, int]:
    return dict(zip(tensor.in_use.logical_axes, tensor.shape, strict=True))

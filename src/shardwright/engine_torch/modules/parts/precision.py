"""Recipes that the modules compute, and which ranks agree on an amax.

Weights are quantized after ``fully_shard`` has gathered them, so only tp holds parts of one. A dim of a block that is entire is
reduced over the ranks that shard it:

| dim | its ranks |
|---|---|
| inputs, in a row-parallel layer | tp |
| outputs, in a column-parallel layer | tp |
| tokens | ``amax_group``; without it, tp where it shards tokens of a layer that is neither, and no others; of delayed amaxes all ranks |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.recipes.delayed import is_computed
from shardwright.core.recipes.kernels import product_kernels
from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.recipe import DIMS, ENTIRE, PER_TENSOR, Dim, Operand, Product, Quantizer, Recipe
from shardwright.engine_torch.io.layer_io import ALONE, NO_SITE, LowPrecision, Site
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.modules.parts.arguments import multiples_near
from shardwright.engine_torch.modules.parts.recipe_objects import RECIPES, recipe_named
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode, peers_in
from shardwright.engine_torch.precision.kernels import product_device

Place = tuple[Product, Operand]


def recipe_of(recipe: object) -> Recipe | None:
    """A recipe by its name or as it is. Raises InputError for another value, and for one that the modules cannot compute."""
    if recipe is None:
        return None
    recipe = recipe_named(recipe) or recipe
    if isinstance(recipe, str):
        if recipe not in PRESETS:
            raise InputError(
                f"there is no recipe '{recipe}'. {did_you_mean(recipe, [*PRESETS, *RECIPES])} The recipes are {', '.join([*PRESETS, *RECIPES])}."
            )
        recipe = preset(recipe)
    if not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe is a {type(recipe).__name__}; it must be one of {', '.join(PRESETS)}, what "
            f"shardwright.core.recipes.presets.preset gives, or Transformer Engine's {', '.join(RECIPES)}."
        )
    for (product, operand), quantizer in recipe.quantizers.items():
        lacks = _lacks(product, quantizer)
        if lacks:
            raise InputError(
                f"recipe '{recipe.name}': {lacks} (of {operand} in {product}), which these modules do not compute. Use one of "
                f"{', '.join(PRESETS)}, or change that."
            )
    if not recipe.counter_based and any(one.rounding == "stochastic" for one in recipe.quantizers.values()):
        raise InputError(
            f"recipe '{recipe.name}': counter_based is false, and random bits of these modules are functions of a counter. Leave it out."
        )
    _require_no_selection(recipe)
    _require_one_factor(recipe)
    return recipe


def _require_no_selection(recipe: Recipe) -> None:
    """Raises InputError for entries that speak of the layers of a model, for weights that are gathered as codes, and for tokens that
    are sent as codes."""
    if recipe.gather_quantized:
        raise InputError(
            f"recipe '{recipe.name}': gather_quantized is true, and these modules gather codes only of weights that rest as codes. Leave it out, "
            f"or give primary_weights='codes'."
        )
    if recipe.dispatch_quantized:
        raise InputError(
            f"recipe '{recipe.name}': dispatch_quantized is true, and these modules send no tokens. Leave it out, and quantize tokens where "
            f"your program sends them."
        )
    for name in ("high", "high_layers", "quantized"):
        if getattr(recipe, name):
            raise InputError(
                f"recipe '{recipe.name}' has '{name}', which chooses among the weights of a model, and a module has no model. Leave it "
                f"out, and give recipe=None to the modules that are to stay in high precision."
            )


def _require_one_factor(recipe: Recipe) -> None:
    """Raises InputError where ranks, or the products of an operand, would have other factors for one tensor."""
    delayed = [(of, each) for (_, of), each in recipe.quantizers.items() if each.amax == "delayed"]
    if delayed and not recipe.reduce_amax:
        raise InputError(
            f"recipe '{recipe.name}': with reduce_amax=False each rank would keep other histories, of which a checkpoint would hold "
            f"one. Leave it out, and give an amax_group if ranks have tensors of their own."
        )
    formats = {operand: {each.dtype for of, each in delayed if of == operand} for operand, _ in delayed}
    for operand, found in formats.items():
        if len(found) > 1:
            raise InputError(
                f"recipe '{recipe.name}': {operand} has delayed amaxes and the formats {' and '.join(sorted(found))}; it has one factor. "
                f"Give it one format in all products."
            )


def _lacks(product: Product, quantizer: Quantizer) -> str:
    if quantizer.amax == "delayed" and not is_computed(quantizer):
        return "it takes amaxes of earlier steps for blocks, or for scales in powers of two"
    # Which would be other values where a pass is computed again.
    return "it rounds stochastically" if product == "output" and quantizer.rounding == "stochastic" else ""


def sharded_dims(mode: Mode | None) -> frozenset[Dim]:
    """The dims of a linear layer's products that tp shards."""
    found: Mapping[Mode | None, frozenset[Dim]] = {"column": frozenset({"outputs"}), "row": frozenset({"inputs"})}
    return found.get(mode, frozenset())


def low_precision(
    recipe: Recipe,
    mode: Mode | None,
    tp: Peers,
    group: Peers | None,
    *,
    sequence_parallel: bool,
    name: str = "",
    site: Site = NO_SITE,
) -> LowPrecision:
    """The quantizer of each operand, and the ranks that hold parts of what shares its scale. ``name``: of the weight; ``site``: of its
    product, with the factors of delayed amaxes."""
    found: dict[Place, Peers] = {}
    for (product, operand), quantizer in recipe.quantizers.items():
        by_tokens = group or (tp if sequence_parallel and mode is None else ALONE)
        if group is None and quantizer.amax == "delayed" and dist.is_initialized():
            assert dist.group.WORLD is not None
            by_tokens = peers_in(dist.group.WORLD)
        extents = quantizer.block.extents(product, operand)
        entire = {dim for dim in DIMS[operand] if extents[dim] is ENTIRE or quantizer.scale.of_tensor}
        if not recipe.reduce_amax:
            continue
        if "tokens" in entire and by_tokens.group is not None:
            found[product, operand] = by_tokens
        elif entire & sharded_dims(mode):
            found[product, operand] = tp
    # The same elements, whatever is contracted: found once for both products.
    same = {place: ("", place[1]) for place, one in recipe.quantizers.items() if one.block == PER_TENSOR}
    return LowPrecision(
        quantizers=recipe.quantizers,
        name=name,
        amax_peers=found,
        same_amax=same,
        delayed={place: f"{name}.{place[1]}" for place, each in recipe.quantizers.items() if each.amax == "delayed"},
        site=site,
    )


def with_kernels(low: LowPrecision | None, x: torch.Tensor) -> LowPrecision | None:
    """The same with the kernels of its products, as the device and the dtype of tokens have them."""
    if low is None:
        return None
    device, dtype = product_device(x.device.type), str(x.dtype).removeprefix("torch.")
    # A grouped layer has a product of its own for each weight.
    chosen = product_kernels(low.quantizers, device, "torch", experts=False, dtype=dtype)
    return replace(low, kernels={product: one.name for product, one in chosen.items()})


def unit_of(recipe: Recipe, dim: Dim) -> int:
    """The elements of a dim that no shard may divide."""
    return max(
        (
            quantizer.block.extents(product, operand)[dim] or 1
            for (product, operand), quantizer in recipe.quantizers.items()
            if dim in DIMS[operand]
        ),
        default=1,
    )


def require_units(
    recipe: Recipe, mode: Mode | None, sizes: Mapping[Dim, int], names: Mapping[Dim, str], num: int, what: str
) -> None:
    """Raises InputError if a shard of one of ``num`` tp ranks ends inside a block. ``sizes``: of the dims, on all ranks."""
    for dim in sharded_dims(mode):
        unit = unit_of(recipe, dim)
        each = sizes[dim] // num
        if num > 1 and each % unit:
            raise InputError(
                f"{what}: {names[dim]}={sizes[dim]} over tp {num} is {each} for each rank, and '{recipe.name}' has blocks of "
                f"{unit} along it, which a shard must not divide. Take {multiples_near(sizes[dim], unit * num)}, fewer tp ranks, or a recipe "
                f"without such blocks, as fp8-row."
            )

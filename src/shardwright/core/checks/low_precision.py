"""SW404: a layout that moves what is quantized. SW416: shards that end inside a block of a recipe. SW417: codes that a chip does
not multiply."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import of_recipe, option, other_recipe, resized, without
from shardwright.core.findings.codes import DEQUANTIZED
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import either, every, others, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.quantization.units import SplitBlock, split_blocks

FREER = ("mxfp8", "fp8-block", "fp8-row", "fp8-delayed", "fp8-current")
"""The recipes that may be free where another is not, those with the most scales first."""

MOST_SIZES = 6
"""Legal sizes that a finding lists."""


def moved_by_the_layout(plan: Plan) -> Iterator[Draft]:
    """SW404: each reason for which an operand is not free, once, with the weights that it is about. What SW416 reports is
    left out."""
    groups: dict[str, list[tuple[QuantizedWeight, QuantizedOperand]]] = {}
    for weight in plan.quantized:
        for operand in weight.operands:
            if not operand.freedom.free and not operand.freedom.ends_inside:
                groups.setdefault(operand.freedom.reason, []).append((weight, operand))
    for reason, found in groups.items():
        first, operand = found[0]
        weights = list(dict.fromkeys(weight.name for weight, _ in found))
        finding = Finding(
            code="SW404",
            severity="warning",
            tensor=first.name,
            where=first.name,
            found=f"{_named([each for weight, each in found if weight == first])}, {operand.quantizer.block.text}: {reason}{_so_are(weights)}",
            needed="what shares a scale on one device, or an amax of all of it",
        )
        yield Draft(finding=finding, candidates=tuple(_freer(plan, weights)))


def _named(operands: list[QuantizedOperand]) -> str:
    """The operands of a weight, with the product if they are of one only.

    >>> from types import SimpleNamespace
    >>> one = SimpleNamespace(operand="output_gradient", product="weight_gradient")
    >>> _named([one]), _named([one, SimpleNamespace(operand="input", product="output")])
    ('output gradient for the weight gradient', 'output gradient and input')
    """
    names = every(dict.fromkeys(each.operand.replace("_", " ") for each in operands))
    products = {each.product.replace("_", " ") for each in operands}
    return f"{names} for the {products.pop()}" if len(products) == 1 else names


def _freer(plan: Plan, weights: list[str]) -> Iterator[Candidate]:
    recipe = plan.request.precision
    assert recipe is not None
    if not recipe.reduce_amax:
        yield of_recipe(plan, reduce_amax=True)
    if not recipe.counter_based:
        yield of_recipe(plan, counter_based=True)
    for name in FREER:
        if name != recipe.name:
            yield other_recipe(name)
    if plan.request.microbatches > 1:
        yield option("microbatches", 1)
    yield of_recipe(plan, high=(*recipe.high, *weights))


def blocks_split(plan: Plan) -> Iterator[Draft]:
    """SW416: each dim that its axes shard inside a block, once for weights of the same size."""
    groups: dict[tuple[object, ...], list[SplitBlock]] = {}
    for one in split_blocks(plan.quantized, plan.mesh):
        key = (one.component, one.dim.names, one.dim.sharding, one.dim.size, one.block)
        groups.setdefault(key, []).append(one)
    for found in groups.values():
        yield _split(plan, found)


def _split(plan: Plan, found: list[SplitBlock]) -> Draft:
    one, recipe = found[0], plan.request.precision
    assert recipe is not None
    dim, grain, block = one.dim, one.dim.grain(plan.mesh), one.block
    tensor = plan.by_name[one.weight]
    assert tensor.at_rest is not None
    spec = tensor.at_rest if recipe.of_codes else tensor.in_use
    # PyTorch's merged dims have the name of the first.
    place = next(n for n, each in enumerate(spec.logical_axes) if each in dim.names)
    named = " x ".join(dim.names)
    legal = [n for n in divisors(dim.sizes[0]) if n == 1 or (dim.size // n) % block == 0]
    sizes = f"{either(legal[-MOST_SIZES:])}" if len(legal) > 1 else "1"
    finding = Finding(
        code="SW416",
        severity="error",
        tensor=one.weight,
        where=f"'{named}' of {one.weight}",
        notation=str(spec),
        mark=place_in(spec, place),
        found=f"{dim.size:,} elements over {product(plan.mesh, dim.axes)}: shards of {grain:,}, which end inside blocks of "
        f"{block} of recipe '{recipe.name}'{_so_are([each.weight for each in found])}",
        needed=f"shards of entire blocks: a product of axes that is {sizes}, or blocks that divide {grain:,}",
    )
    return Draft(finding=finding, candidates=tuple(_entire(plan, one, legal)))


def _so_are(names: list[str]) -> str:
    return f"; so are those of {others(names[1:], 'weight')}" if len(names) > 1 else ""


def _entire(plan: Plan, one: SplitBlock, legal: list[int]) -> Iterator[Candidate]:
    recipe = plan.request.precision
    assert recipe is not None
    if recipe.of_codes:
        given = ("gather_quantized", "rest_quantized")
        yield of_recipe(plan, **{name: False for name in given if getattr(recipe, name)})
    for axis in reversed(one.dim.axes):
        rest = plan.mesh.size(a for a in one.dim.axes if a != axis)
        for size in reversed([n // rest for n in legal if n % rest == 0 and n // rest < plan.mesh.size(axis)]):
            yield from resized(plan, axis, size)
    for name in (*FREER, "nvfp4"):
        yield other_recipe(name)
    yield of_recipe(plan, high=(*recipe.high, one.weight))


def dequantized(plan: Plan) -> Iterator[Draft]:
    """SW417: each reason for which the chip multiplies values of codes, once, with the weights and products that it is about. An error where
    the recipe gains nothing on several devices: one device may try its numbers."""
    chip, recipe = plan.request.chip, plan.request.precision
    groups: dict[tuple[str, str], list[tuple[QuantizedWeight, str]]] = {}
    for weight in plan.quantized:
        for of, kernel in weight.kernels.items():
            if not kernel.kernel.of_codes:
                groups.setdefault((kernel.name, kernel.why), []).append((weight, of.replace("_", " ")))
    for (kernel, why), found in groups.items():
        assert chip is not None
        assert recipe is not None
        weights = {weight.name: weight for weight, _ in found}
        products = list(dict.fromkeys(product for _, product in found))
        # A weight of which the chip multiplies other products' codes gains from the recipe.
        partly = all(any(one.kernel.of_codes for one in weight.kernels.values()) for weight in weights.values())
        finding = Finding(
            code=DEQUANTIZED,
            severity="info" if partly else "error" if plan.mesh.num_devices > 1 else "warning",
            tensor=found[0][0].name,
            where=f"{found[0][0].name} on {chip.name}",
            found=f"{every(products)}: values of the codes of '{recipe.name}' are multiplied in {kernel}: {why}"
            f"{_so_are(list(weights))}",
            needed="a product of codes: a recipe of which the chip has one, or a chip that has one for this recipe",
            cost=f"the products take as long as in {kernel}, and operands are quantized in addition",
        )
        yield Draft(finding=finding, candidates=tuple(_of_codes(plan, recipe.name)))


def _of_codes(plan: Plan, recipe: str) -> Iterator[Candidate]:
    if plan.request.dtype != "bfloat16":
        yield option("dtype", "bfloat16")
    yield from (other_recipe(name) for name in FREER if name != recipe)
    yield without("precision")

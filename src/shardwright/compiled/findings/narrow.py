"""SW314: products of values where the plan multiplies codes."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.widths import width
from shardwright.compiled.reading.program import CompiledProduct, CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, every, others
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.recipes.recipe import Product

PHASES: dict[str, tuple[Product, ...]] = {
    "forward": ("output",),
    "recompute": ("output",),
    "backward": ("input_gradient", "weight_gradient"),
}
"""The products of a weight in each phase."""


def narrow(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """A warning for each component, kernel and dtype. The two products of the backward pass have one name: where the plan multiplies
    codes in one of them only, one of codes is enough."""
    del agreement
    groups: dict[tuple[str, str, str], list[tuple[QuantizedWeight, CompiledProduct]]] = {}
    for weight in plan.quantized:
        for phase, products in PHASES.items():
            kernels = [weight.kernels[product] for product in products if product in weight.kernels]
            of_codes = [one.name for one in kernels if one.kernel.of_codes]
            found = [one for one in program.products if weight.name in one.tensors and one.phase == phase]
            wide = [one for one in found if not _of_codes(one)]
            # A weight may be high in some layers, which multiply values.
            all_layers = weight.num == plan.by_name[weight.name].num
            unplanned = wide and ((len(of_codes) == len(products) and all_layers) or len(wide) == len(found))
            if of_codes and unplanned:
                widest = max((dtype for one in wide for dtype in one.dtypes), key=width)
                key = (weight.component, of_codes[0], widest)
                groups.setdefault(key, []).extend((weight, one) for one in wide)
    for (component, kernel, dtype), ones in groups.items():
        weights = list(dict.fromkeys(weight.name for weight, _ in ones))
        phases = dict.fromkeys(str(one.phase) for _, one in ones)
        lines = list(dict.fromkeys(one.source for _, one in ones if one.source))
        at = f"\nat {others(lines, 'line')}" if lines else ""
        yield Finding(
            code="SW314",
            severity="warning",
            where=f"'{component}': products with {others(weights, 'weight')}",
            tensor=weights[0],
            found=f"{dtype}: {count(sum(one.num_ops for _, one in ones), 'product')} in {every(phases)}{at}",
            needed=f"codes, which kernel '{kernel}' multiplies",
            cost=f"the rate of {dtype} in place of that of the codes",
        )


def _of_codes(one: CompiledProduct) -> bool:
    return all(dtype.startswith(("float8", "float4")) for dtype in one.dtypes)

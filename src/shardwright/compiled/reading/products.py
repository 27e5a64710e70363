"""The products with a named weight in a compiled program, with the dtypes of what they multiply.

The JAX engine names a weight around its products where a recipe quantizes them, and only there.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiled.reading.flops import flops_of
from shardwright.compiled.reading.program import CompiledProduct
from shardwright.compiled.text.calls import Execution
from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.origins import Sources, merged, origins_of
from shardwright.compiled.text.shapes import our_dtype


def read_products(program: Program, runs: Mapping[str, Execution], sources: Sources) -> tuple[CompiledProduct, ...]:
    """Equal products are one row with a count of the instructions."""
    found: dict[CompiledProduct, int] = {}
    for name, computation in program.computations.items():
        run = runs.get(name)
        if run is None or not run.times:
            continue
        for one in computation.instructions:
            if not one.op_name or "tensor=" not in one.op_name or not flops_of(computation, one):
                continue
            origin = merged(origins_of(one.op_name))
            product = CompiledProduct(
                component=origin.component,
                phase=origin.phase,
                tensors=origin.tensors,
                dtypes=_operands(computation, one),
                source=sources.of_instruction(one.rest),
            )
            found[product] = found.get(product, 0) + 1
    return tuple(product.times(number) for product, number in found.items())


def _operands(where: Computation, one: Instruction) -> tuple[str, ...]:
    """The dtypes of both operands; of block scales those of the codes."""
    return tuple(our_dtype(where.by_name[name].arrays[0].dtype) for name in one.operands[:2])

"""Multiplications of products and convolutions, counted one by one by an oracle of three loops."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiled.reading.flops import Window, flops_of
from shardwright.compiled.text.hlo import parse
from shardwright.core.mesh.mesh import Mesh
from tests.compiled.reading import entry, program_of


def flops(line: str, left: str, right: str) -> int:
    text = entry(f"%a = {left} parameter(0)\n%b = {right} parameter(1)\n%r = {line}")
    where = parse(text).computations["main"]
    return flops_of(where, where.root)


def test_products() -> None:
    contracted = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    line = f"f32[3,5,11]{{2,1,0}} dot(%a, %b), {contracted}"
    assert flops(line, "f32[3,5,7]{2,1,0}", "f32[3,7,11]{2,1,0}") == 2 * 3 * 5 * 7 * 11
    two = "f32[5]{0} dot(%a, %b), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}"
    assert flops(two, "f32[5,7,3]{2,1,0}", "f32[7,3]{1,0}") == 2 * 5 * 7 * 3
    library = (
        '(f32[5,11]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )
    assert flops(library, "f32[5,7]{1,0}", "f32[7,11]{1,0}") == 2 * 5 * 7 * 11
    assert flops("f32[5,7]{1,0} add(%a, %b)", "f32[5,7]{1,0}", "f32[5,7]{1,0}") == 0


def test_products_as_tpu_writes_them() -> None:
    plain = "bf16[5,11]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    assert flops(plain, "bf16[5,7]{1,0}", "bf16[7,11]{1,0}") == 2 * 5 * 7 * 11
    transposed = "bf16[5,11]{1,0} convolution(%a, %b), dim_labels=fb_io->bf"
    assert flops(transposed, "bf16[7,5]{1,0}", "bf16[7,11]{1,0}") == 2 * 5 * 7 * 11
    # Three products, one per row: a kernel as long as the input, which meets one position at a time.
    batch = "bf16[3,5,11]{2,1,0} convolution(%a, %b), window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf"
    assert flops(batch, "bf16[3,5,7]{2,1,0}", "bf16[3,7,11]{2,1,0}") == 2 * 3 * 5 * 7 * 11


@given(
    *(st.integers(1, 6) for _ in range(3)),
    *(st.integers(1, 4) for _ in range(3)),
    st.integers(-3, 6),
)
def test_places_that_meet(
    left: int, kernel: int, result: int, stride: int, holes_left: int, holes_kernel: int, before: int
) -> None:
    """XLA's definition, position by position: an element of the input that is neither padding nor dilation."""
    there = range(0, (left - 1) * holes_left + 1, holes_left)
    pairs = product(range(result), range(kernel))
    expected = sum(place * stride + element * holes_kernel - before in there for place, element in pairs)
    window = Window(stride=stride, before=before, holes_left=holes_left, holes_kernel=holes_kernel)
    assert window.met(left, kernel, result) == expected


def test_products_without_a_component_and_loops_without_a_trip_count() -> None:
    product_of = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = f"""
      %a = f32[4,4]{{1,0}} parameter(0)
      %b = f32[4,4]{{1,0}} {product_of}, metadata={{op_name="jit(f)/component=mlp/dot_general"}}
      %c = f32[4,4]{{1,0}} {product_of}
    """
    program = program_of(entry(lines), Mesh.of(fsdp=8))
    assert (program.flops_per_device, program.component_flops) == (2 * 2 * 4**3, {"mlp": 2 * 4**3})
    body = """%body (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %q = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%until (u: f32[4,4]) -> pred[] {
  %u = f32[4,4]{1,0} parameter(0)
  ROOT %v = pred[] constant(false)
}
"""
    loop = "%a = f32[4,4]{1,0} parameter(0)\n%w = f32[4,4]{1,0} while(%a), condition=%until, body=%body"
    unknown = program_of(entry(loop, before=body), Mesh.of(fsdp=8))
    assert (unknown.flops_per_device, unknown.component_flops) == (None, {})

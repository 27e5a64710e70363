"""What between the start and the done of a collective hides it: products, and nothing else."""

from __future__ import annotations

import pytest

from shardwright.core.mesh.mesh import Mesh
from tests.compiled.reading import entry, program_of

MESH = Mesh.of(fsdp=4, tensor=2)
GROUPS = "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}"
INSIDE = """%multiplied (a: f32[32,32]) -> f32[32,32] {
  %a = f32[32,32]{1,0} parameter(0)
  ROOT %n = f32[32,32]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%around (b: f32[32,32]) -> f32[32,32] {
  %b = f32[32,32]{1,0} parameter(0)
  ROOT %o = f32[32,32]{1,0} fusion(%b), kind=kOutput, calls=%multiplied
}

%negated (c: f32[32,32]) -> f32[32,32] {
  %c = f32[32,32]{1,0} parameter(0)
  ROOT %m = f32[32,32]{1,0} negate(%c)
}

%gathered (d: f32[1024]) -> f32[4096] {
  %d = f32[1024]{0} parameter(0)
  ROOT %g = f32[4096]{0} all-gather(%d), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}
"""
PRODUCTS = {
    "a dot": "f32[32,32]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "a convolution": "f32[32,32]{1,0} convolution(%x, %x), dim_labels=bf_io->bf",
    "a library's product": 'f32[32,32]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"',
    "a kernel": 'f32[32,32]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"',
    "a fusion with a product": "f32[32,32]{1,0} fusion(%x), kind=kOutput, calls=%multiplied",
    "a call of a fusion with one": "f32[32,32]{1,0} call(%x), to_apply=%around",
}
OTHERS = {
    "nothing": "",
    "a copy": "f32[32,32]{1,0} copy(%x)",
    "a transposition": "f32[32,32]{1,0} transpose(%x), dimensions={1,0}",
    "a fusion without a product": "f32[32,32]{1,0} fusion(%x), kind=kLoop, calls=%negated",
    "a call without a product": "f32[32,32]{1,0} call(%x), to_apply=%negated",
    "another collective": f"f32[4096]{{0}} all-gather(%p), {GROUPS}",
    "a fusion with a collective": "f32[4096]{0} fusion(%p), kind=kCustom, calls=%gathered",
    "an allocation": 'f32[32,32]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
    "a product of a few numbers": "f32[2,2]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
}


def overlapped(between: str, after: str = "") -> bool | None:
    """Whether the collective of a program is overlapped, with an instruction before its done, and one after it."""
    text = entry(
        f"""
          %p = f32[1024]{{0}} parameter(0)
          %x = f32[32,32]{{1,0}} parameter(1)
          %y = f32[2,2]{{1,0}} parameter(2)
          %s = (f32[1024]{{0}}, f32[4096]{{0}}) all-gather-start(%p), {GROUPS}
          {f"%between = {between}" if between else ""}
          %d = f32[4096]{{0}} all-gather-done(%s)
          {f"%after = {after}" if after else ""}
        """,
        before=INSIDE,
    )
    return next(one.overlapped for one in program_of(text, MESH, "h100:1x8").collectives if one.shape == (4096,))


@pytest.mark.parametrize("what", PRODUCTS)
def test_a_product_hides_a_collective(what: str) -> None:
    assert overlapped(PRODUCTS[what]) is True


@pytest.mark.parametrize("what", OTHERS)
def test_nothing_else_does(what: str) -> None:
    assert overlapped(OTHERS[what], after=PRODUCTS["a dot"]) is False

"""The context of a collective: its users, its operand's source, whether it is loop-invariant, the kind it stands for."""

from __future__ import annotations

import pytest

from shardwright.compiled.reading.program import CompiledCollective
from shardwright.core.mesh.mesh import Mesh
from tests.compiled.reading import entry, only, program_of

MESH = Mesh.of(fsdp=4, tensor=2)
GROUPS = "replica_groups={{0,2,4,6},{1,3,5,7}}"


def collective(lines: str, before: str = "", kind: str = "") -> CompiledCollective:
    program = program_of(entry(lines, before=before), MESH)
    return only(program) if not kind else next(one for one in program.collectives if one.kind == kind)


SLICED = """%sliced (a: f32[64], b: s32[]) -> f32[16] {
  %a = f32[64]{0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[64]{0} bitcast(%a)
  ROOT %d = f32[16]{0} dynamic-slice(%c, %b), dynamic_slice_sizes={16}
}
"""
SUM = f"%r = f32[64]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add"


@pytest.mark.parametrize(
    ("uses", "found", "stands_for"),
    [
        ("%x = f32[16]{0} fusion(%r, %i), kind=kLoop, calls=%sliced", ("dynamic-slice",), "reduce-scatter"),
        ("%x = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}", ("dynamic-slice",), "reduce-scatter"),
        ("%y = f32[64]{0} negate(%r)\n%x = f32[16]{0} dynamic-slice(%r, %i)", ("dynamic-slice", "negate"), None),
        ("%y = f32[8,8]{1,0} reshape(%r)\n%x = f32[8]{0} reduce(%y, %i), to_apply=%add", ("reduce",), None),
        ("%x = f32[4]{0} slice(%r), slice={[0:4]}", ("slice",), None),
    ],
)  # fmt: skip
def test_a_sum_and_its_users(uses: str, found: tuple[str, ...], stands_for: str | None) -> None:
    one = collective(f"%p = f32[64]{{0}} parameter(0)\n%i = s32[] parameter(1)\n{SUM}\n{uses}", SLICED)
    assert (one.users, one.stands_for) == (found, stands_for)


def test_each_of_several_tensors_has_its_own_users() -> None:
    program = program_of(
        entry(f"""
          %p = f32[64]{{0}} parameter(0)
          %r = (f32[64]{{0}}, f32[64]{{0}}) all-reduce(%p, %p), {GROUPS}, to_apply=%add
          %a = f32[64]{{0}} get-tuple-element(%r), index=0
          %b = f32[64]{{0}} get-tuple-element(%r), index=1
          %c = f32[16]{{0}} dynamic-slice(%b, %i), dynamic_slice_sizes={{16}}
          %z = f32[64]{{0}} negate(%a)
        """),
        MESH,
    )
    assert [(one.users, one.stands_for) for one in program.collectives] == [
        (("negate",), None),
        (("dynamic-slice",), "reduce-scatter"),
    ]


def test_slices_of_concatenated_tensors_are_no_users() -> None:
    """Each slice of the sum of concatenated tensors is one entire tensor."""
    one = collective("""
      %p = f32[64]{0} parameter(0)
      %q = f32[128]{0} concatenate(%p, %p), dimensions={0}
      %r = f32[128]{0} all-reduce(%q), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
      %x = f32[64]{0} slice(%r), slice={[0:64]}
      %z = f32[64]{0} negate(%x)
    """)
    assert one.users == ("negate",)


def test_a_sum_of_a_shard_in_zeros() -> None:
    one = collective(f"""
      %p = s32[4]{{0}} parameter(0)
      %zeros = s32[16]{{0}} broadcast(%zero), dimensions={{}}
      %u = s32[16]{{0}} dynamic-update-slice(%zeros, %p, %i)
      %r = s32[16]{{0}} all-reduce(%u), {GROUPS}, to_apply=%add
      %z = s32[16]{{0}} negate(%r)
    """)
    assert (one.stands_for, one.dtypes) == ("all-gather", ("int32",))


OFFLOADED = """%called (a: f32[16], b: token[]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = token[] parameter(1)
  ROOT %g = f32[16]{0} all-reduce(%a), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize(
    ("given", "stands_for"),
    [
        ("%u = f32[16]{0} dynamic-update-slice(%zeros, %p, %i)", "all-gather"),
        (
            "%v = f32[16]{0} dynamic-update-slice(%zeros, %p, %i)\n%w = (f32[16]{0}, f32[16]{0}, u32[]) copy-start(%v)\n"
            "%u = f32[16]{0} copy-done(%w)",
            "all-gather",
        ),
        ("%u = f32[16]{0} add(%zeros, %zeros)", None),
        ("%v = f32[16]{0} dynamic-update-slice(%zeros, %p, %i)\n%u = f32[16]{0} add(%v, %zeros)", None),
    ],
)
def test_a_sum_of_a_shard_in_zeros_on_another_thread(given: str, stands_for: str | None) -> None:
    """libtpu for TPU7x sums on SparseCores: what is summed is the caller's operand."""
    lines = f"""
      %p = f32[4]{{0}} parameter(0)
      %i = s32[] parameter(1)
      %t = token[] after-all()
      %zeros = f32[16]{{0}} broadcast(%zero), dimensions={{}}
      {given}
      %s = ((f32[16]{{0}}, token[]), f32[16]{{0}}) call-start(%u, %t), async_execution_thread="sparsecore", to_apply=%called
      %d = f32[16]{{0}} call-done(%s)
      %z = f32[16]{{0}} negate(%d)
    """
    one = collective(lines, OFFLOADED)
    assert (one.kind, one.stands_for) == ("all-reduce", stands_for)


def test_permutes_of_the_source_program() -> None:
    for name, stands_for in (("ppermute", None), ("bld,df->blf/dot_general", "all-gather")):
        one = collective(f"""
          %p = f32[64]{{0}} parameter(0)
          %shard = f32[16]{{0}} dynamic-slice(%p, %i), dynamic_slice_sizes={{16}}
          %r = f32[16]{{0}} collective-permute(%shard), source_target_pairs={{{{0,2}},{{2,4}}}}, metadata={{op_name="jit(f)/{name}"}}
          %z = f32[16]{{0}} negate(%r)
        """)
        assert one.stands_for == stands_for


def test_permutes_of_sums_are_a_scatter() -> None:
    """Zeros are permuted first, then accumulated products."""
    name = 'metadata={op_name="jit(f)/transpose(jvp())/dot_general"}, source_target_pairs={{0,2},{2,4}}'
    program = program_of(
        entry(f"""
          %p = f32[16]{{0}} parameter(0)
          %zero = f32[] constant(0)
          %zeros = f32[16]{{0}} broadcast(%zero), dimensions={{}}
          %r = f32[16]{{0}} collective-permute(%zeros), {name}
          %s = f32[16]{{0}} add(%r, %p)
          %t = f32[16]{{0}} collective-permute(%s), {name}
          %z = f32[16]{{0}} negate(%t)
        """),
        MESH,
    )
    assert {one.stands_for for one in program.collectives} == {"reduce-scatter"}


LOOP = """%body (p: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %p = (s32[], f32[8]{{0}}, f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8]{{0}} get-tuple-element(%p), index=1
  %x = f32[8]{{0}} get-tuple-element(%p), index=2
  %o = s32[] constant(1)
  %next = s32[] add(%i, %o)
  %half = f32[8]{{0}} multiply({of}, {of})
  %r = f32[32]{{0}} all-gather(%half), replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, dimensions={{0}}
  %y = f32[8]{{0}} slice(%r), slice={{[0:8]}}
  %kept = f32[8]{{0}} {kept}
  ROOT %t = (s32[], f32[8]{{0}}, f32[8]{{0}}) tuple(%next, %kept, %y)
}}

%until (q: (s32[], f32[8], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]{{0}}, f32[8]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %three = s32[] constant(3)
  ROOT %c = pred[] compare(%j, %three), direction=LT
}}
"""


@pytest.mark.parametrize(
    ("of", "kept", "invariant"),
    [
        ("%w", "copy(%w)", True),
        ("%w", "negate(%w)", False),
        ("%x", "copy(%w)", False),
        ("%i", "copy(%w)", False),
    ],
)
def test_loop_invariant_collectives(of: str, kept: str, invariant: bool) -> None:
    one = collective(
        """
          %y = f32[8]{0} parameter(0)
          %zero = s32[] constant(0)
          %s = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %y, %y)
          %l = (s32[], f32[8]{0}, f32[8]{0}) while(%s), condition=%until, body=%body
          %z = f32[8]{0} get-tuple-element(%l), index=2
        """,
        LOOP.format(of=of, kept=kept),
    )
    assert (one.count_per_step, one.in_loop, one.loop_invariant) == (3, True, invariant)


def test_nothing_outside_of_loops_is_loop_invariant() -> None:
    assert not collective(f"%p = f32[64]{{0}} parameter(0)\n{SUM}\n%z = f32[64]{{0}} negate(%r)").loop_invariant


LATENT = """
  %h = bf16[512,64]{1,0} parameter(0)
  %down = bf16[64,16]{1,0} parameter(1)
  %up = bf16[16,2048]{1,0} parameter(2)
  %latent = bf16[512,16]{1,0} dot(%h, %down), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %keys = bf16[512,2048]{1,0} dot(%latent, %up), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""


@pytest.mark.parametrize(
    ("sent", "smaller"),
    [
        ("%t = bf16[2048,512]{1,0} transpose(%keys), dimensions={1,0}", 512 * 16 * 2),
        ("%t = bf16[512,16]{1,0} copy(%latent)", None),
        ("%r = bf16[512,2048]{1,0} copy(%keys)\n%t = bf16[512,2048]{1,0} add(%keys, %r)", None),
        ("%r = bf16[512,2048]{1,0} tanh(%keys)\n%t = bf16[512,2048]{1,0} multiply(%keys, %r)", None),
        (
            "%r = bf16[512,2048]{1,0} tanh(%keys)\n%t = bf16[2048,2048]{1,0} dot(%keys, %r), lhs_contracting_dims={0}",
            None,
        ),
        ("%r = bf16[4,16]{1,0} parameter(3)\n%t = bf16[4,128,16]{2,1,0} broadcast(%r), dimensions={0,2}", 4 * 16 * 2),
        ("%t = bf16[16,2048]{1,0} copy(%up)", None),
    ],
    ids=["keys of a latent", "the latent", "a sum", "a gate", "scores", "repeated heads", "a weight"],
)
def test_operands_that_were_expanded_from_something_smaller(sent: str, smaller: int | None) -> None:
    """The bytes of sending the smaller one instead: the result of a gather is four times a device's shard."""
    gathered = f"%g = bf16[8192,2048]{{1,0}} all-gather(%t), {GROUPS}, dimensions={{0}}"
    one = collective(f"{LATENT.strip()}\n{sent}\n{gathered}\n%z = bf16[8192,2048]{{1,0}} negate(%g)")
    assert one.made_from_bytes == (None if smaller is None else 4 * smaller)

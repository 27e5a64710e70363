"""Each form in which compilers write a collective, a few lines of text each."""

from __future__ import annotations

import pytest

from shardwright.compiled.text.hlo import parse
from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh
from tests.compiled.reading import entry, only, program_of

MESH = Mesh.of(fsdp=4, tensor=2)
GROUPS = "replica_groups=[2,4]<=[4,2]T(1,0)"
WAITS = ', backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
NAMED = (
    ', metadata={op_name="jit(f)/jvp()/(component=mlp/tensor=up/all_gather:component=attention/tensor=q/all_gather)"}'
)


def test_several_tensors_gathered_at_once() -> None:
    """Inputs first, then outputs, which count; each tensor has its own name, and the done is not another gather."""
    program = program_of(
        entry(f"""
          %a = bf16[8,16]{{1,0}} parameter(0)
          %b = f32[4]{{0}} parameter(1)
          %s = ((bf16[8,16]{{1,0}}, f32[4]{{0}}), (bf16[32,16]{{1,0}}, f32[16]{{0}})) all-gather-start(%a, %b), {GROUPS}, dimensions={{0}}{NAMED}
          %d = (bf16[32,16]{{1,0}}, f32[16]{{0}}) all-gather-done(%s)
          %x = f32[16]{{0}} get-tuple-element(%d), index=1
        """),
        MESH,
        "h100:1x8",
    )
    first, second = program.collectives
    assert (first.bytes_per_device, first.dtypes, first.component, first.tensors) == (
        1024,
        ("bfloat16",),
        "mlp",
        ("up",),
    )
    assert (second.bytes_per_device, second.dtypes, second.tensors) == (64, ("float32",), ("q",))
    assert (first.axes, first.group_size, first.overlapped) == (("fsdp",), 4, False)


@pytest.mark.parametrize(
    ("start", "kind", "num_bytes"),
    [
        (f"%s = f32[8]{{0}} all-reduce-start(%p), {GROUPS}", "all-reduce", 32),
        (f"%s = ((f32[8]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {GROUPS}, dimensions={{0}}", "reduce-scatter", 32),
        (f"%s = ((f32[8]{{0}}), f32[8]{{0}}) all-to-all-start(%p), {GROUPS}, dimensions={{0}}", "all-to-all", 32),
        ("%s = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
         "source_target_pairs={{0,2},{2,4},{4,6}}", "permute", 32),
        ("%s = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p), source_target_pairs={{0,2},{2,0}}", "permute", 32),
        (f"%s = ((f32[8]{{0}}, f32[12]{{0}}, s64[4]{{0}}), f32[12]{{0}}) ragged-all-to-all-start(%p, %o, %q), {GROUPS}", "all-to-all", 48),
        (f"%s = f32[8]{{0}} collective-broadcast(%p), {GROUPS}", "broadcast", 32),
        (f"%s = f32[32]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}", "all-gather", 128),
        (f"%s = f32[2]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}", "reduce-scatter", 32),
        (f"%s = (f32[2]{{0}}, f32[2]{{0}}, f32[2]{{0}}, f32[2]{{0}}) all-to-all(%p, %p, %p, %p), {GROUPS}", "all-to-all", 32),
    ],
)  # fmt: skip
def test_one_tensor(start: str, kind: str, num_bytes: int) -> None:
    """The larger of operand and result; an all-to-all with a tuple result counts the sum of its arrays."""
    found = only(program_of(entry(f"%p = f32[8]{{0}} parameter(0)\n{start}{WAITS}"), MESH, "h100:1x8"))
    assert (found.kind, found.bytes_per_device, found.axes, found.overlapped) == (kind, num_bytes, ("fsdp",), False)
    assert found.ragged == ("ragged" in start)


def test_a_sum_of_several_tensors_is_one_of_each() -> None:
    """Also of different dtypes. Names are those of the operands, since the sum has none."""
    program = program_of(
        entry(f"""
          %p = f32[8]{{0}} parameter(0)
          %a = f32[8]{{0}} negate(%p), metadata={{op_name="jit(f)/transpose(jvp(component=mlp))/tensor=up/dot_general"}}
          %c = bf16[16]{{0}} copy(%b)
          %b = bf16[16]{{0}} negate(%p), metadata={{op_name="jit(f)/transpose(jvp(component=moe))/dot_general"}}
          %r = (f32[8]{{0}}, bf16[16]{{0}}) all-reduce(%a, %c), {GROUPS}, to_apply=%add
          %x = f32[8]{{0}} get-tuple-element(%r), index=0
        """),
        MESH,
    )
    found = [(one.component, one.phase, one.dtypes, one.bytes_per_device) for one in program.collectives]
    assert found == [("mlp", "backward", ("float32",), 32), ("moe", "backward", ("bfloat16",), 32)]


def test_tensors_gathered_under_one_name_of_several() -> None:
    """A compiler that keeps one name: the component of each tensor is that of its user, and tensor names are unknown."""
    name = 'metadata={op_name="jit(f)/jvp()/component=mlp/tensor=up/all_gather"}'
    program = program_of(
        entry(f"""
          %p = f32[8]{{0}} parameter(0)
          %g = (f32[32]{{0}}, f32[32]{{0}}) all-gather(%p, %p), {GROUPS}, dimensions={{0}}, {name}
          %a = f32[32]{{0}} get-tuple-element(%g), index=0, {name}
          %b = f32[32]{{0}} get-tuple-element(%g), index=1, {name}
          %c = f32[32]{{0}} dot(%a, %a), metadata={{op_name="jit(f)/jvp()/component=mlp/dot_general"}}
          %z = f32[32]{{0}} dot(%b, %b), metadata={{op_name="jit(f)/jvp()/component=attention/dot_general"}}
        """),
        MESH,
    )
    found = [(one.component, one.phase, one.tensors, one.operation) for one in program.collectives]
    assert found == [("mlp", "forward", (), "all_gather"), ("attention", "forward", (), "all_gather")]


def test_a_sum_whose_scopes_are_only_in_its_reducer() -> None:
    """The phase is that of the operand."""
    text = entry(
        f"""
          %p = f32[8]{{0}} parameter(0)
          %a = f32[8]{{0}} negate(%p), metadata={{op_name="jit(f)/transpose(jvp(component=mlp))/dot_general"}}
          %r = f32[8]{{0}} all-reduce(%a), {GROUPS}, to_apply=%region
          %z = f32[8]{{0}} negate(%r)
        """,
        before="""%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="component=moe/tensor=layers.moe.up/reduce_scatter"}
  %b = f32[] parameter(1), metadata={op_name="component=moe/tensor=layers.moe.up/reduce_scatter"}
  ROOT %s = f32[] add(%a, %b), metadata={op_name="component=moe/tensor=layers.moe.up/add"}
}
""",
    )
    found = only(program_of(text, MESH))
    assert (found.component, found.tensors, found.operation) == ("moe", ("layers.moe.up",), "reduce_scatter")
    assert found.phase == "backward"


def test_a_collective_on_another_execution_thread() -> None:
    """A computation whose last line names its unit: one collective, which overlaps with the product in between."""
    text = entry(
        """
          %p = f32[1024]{0} parameter(0)
          %t = token[] after-all()
          %s = ((f32[1024]{0}, token[]), f32[4096]{0}) call-start(%p, %t), async_execution_thread="sparsecore", to_apply=%called
          %work = f32[32,32]{1,0} fusion(%p), kind=kOutput, calls=%fused
          %d = f32[4096]{0} call-done(%s)
        """,
        before="""%called (a: f32[1024], b: token[]) -> f32[4096] {
  %a = f32[1024]{0} parameter(0)
  %b = token[] parameter(1)
  ROOT %g = f32[4096]{0} all-gather(%a), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}, execution_thread="sparsecore"

%fused (c: f32[1024]) -> f32[32,32] {
  %c = f32[1024]{0} parameter(0)
  %m = f32[32,32]{1,0} bitcast(%c)
  ROOT %n = f32[32,32]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""",
    )
    found = only(program_of(text, MESH, "tpu7x:2x2x1"))
    assert (found.kind, found.overlapped, found.bytes_per_device) == ("all-gather", True, 16384)
    synchronous = "\n".join(line for line in text.splitlines() if "%work" not in line)
    assert only(program_of(synchronous, MESH, "tpu7x:2x2x1")).overlapped is False


PAIRS = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,2},{2,4}}"}'


def test_sent_and_received() -> None:
    """Between the ends of pairs. A transfer to the host is not a collective."""
    program = program_of(
        entry(f"""
          %p = f32[8]{{0}} parameter(0)
          %t = token[] after-all()
          %s = (f32[8]{{0}}, u32[], token[]) send(%p, %t), channel_id=1, {PAIRS}
          %r = (f32[8]{{0}}, u32[], token[]) recv(%t), channel_id=1, {PAIRS}
          %e = token[] send-done(%s), channel_id=1
          %h = (f32[8]{{0}}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true
          %x = f32[8]{{0}} negate(%p)
        """),
        MESH,
        "h100:1x8",
    )
    found = only(program)
    assert (found.kind, found.axes, found.bytes_per_device, found.across_slices) == ("send-recv", ("fsdp",), 32, False)


def test_what_moves_nothing() -> None:
    """Groups of one device, and pairs of a device with itself."""
    program = program_of(
        entry("""
          %p = f32[8]{0} parameter(0)
          %a = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
          %b = f32[8]{0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}
        """),
        MESH,
    )
    assert program.collectives == ()


def test_equal_ones_are_one_row() -> None:
    line = f"= f32[8]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add"
    lines = ["%p = f32[8]{0} parameter(0)", *(f"%{name} {line}" for name in "abc"), "%z = f32[8]{0} negate(%p)"]
    found = only(program_of(entry("\n".join(lines)), MESH))
    assert (found.count_per_step, found.num_ops) == (3, 3)


def test_a_program_of_one_slice_of_two() -> None:
    mesh = Mesh.of(data=2, fsdp=4, tensor=2)
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="a.1_0",_xla_megascale_target="{1,2}x'
        '{0:7}",_xla_megascale_transfer_type="ALL_GATHER"}'
    )
    program = program_of(
        entry(f"""
          %p = f32[8]{{0}} parameter(0)
          %t = token[] after-all()
          %s = (f32[8]{{0}}, u32[], token[]) send(%p, %t), channel_id=2, {attributes}
          %r = (f32[16]{{0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}
          %x = f32[8]{{0}} negate(%p)
        """),
        mesh,
    )
    found = only(program)
    assert (found.kind, found.axes, found.group_size) == ("all-gather", ("data",), 2)
    # The received array is larger than the sent one.
    assert (found.bytes_per_device, found.across_slices) == (64, True)


def test_an_instruction_over_several_lines() -> None:
    """A line that begins with two braces, or is one, does not end a computation while an attribute is open."""
    text = entry(f"""
      %p = f32[8]{{0}} parameter(0)
      %k = f32[8]{{0}} custom-call(%p), custom_call_target="kernel", frontend_attributes={{kernel_metadata={{
      "a":{{"b":1
      }}
      }}}}, metadata={{op_name="jit(f)/component=attention/kernel"}}
      %r = f32[8]{{0}} all-reduce(%k), {GROUPS}, to_apply=%add
    """).replace("\n  }", "\n}")
    assert "\n}\n}}, metadata" in text
    assert only(program_of(text, MESH)).component == "attention"


def test_text_that_is_no_program() -> None:
    for text in ("", "HloModule jit_step\n", "%f (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"):
        with pytest.raises(InputError) as error:
            parse(text)
        assert str(error.value) == (
            "This is not the text of a compiled program: it has no computation that begins with 'ENTRY' and ends with a "
            "line '}'."
        )


@pytest.mark.parametrize("rows", [0, 12])
def test_the_padding_of_a_fused_reduce_scatter(rows: int) -> None:
    """192 columns fill a tile and a half, and two tiles are sent; rows of tiles are added for even shards."""
    padded = f"bf16[{8192 + rows},8,128]{{2,1,0:T(8,128)(2,1)}}"
    pad = f"%a = {padded} pad(%b, %c), padding=0_{rows}x0_0x0_0" if rows else f"%a = {padded} bitcast(%b)"
    part = f"bf16[{(8192 + rows) // 4},8,128]{{2,1,0:T(8,128)(2,1)}}"
    scatter = f"""%all-reduce-scatter.1 (p: bf16[2048,16,192]) -> {part} {{
  %p = bf16[2048,16,192]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  %c = bf16[] constant(0)
  %b = bf16[8192,8,128]{{2,1,0:T(8,128)(2,1)}} bitcast(%p)
  {pad}
  %r = {padded} all-reduce(%a), {GROUPS}, to_apply=%add
  %z = s32[] constant(0)
  ROOT %s = {part} dynamic-slice(%r, %z, %z, %z), dynamic_slice_sizes={{{(8192 + rows) // 4},8,128}}
}}
"""
    text = entry(
        f"""
          %p = bf16[2048,16,192]{{2,1,0:T(8,128)(2,1)}} parameter(0)
          %f = {part} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
        """,
        before=scatter,
    )
    one = only(program_of(text, MESH))
    sent, unpadded = (8192 + rows) * 8 * 128 * 2, 2048 * 16 * 192 * 2
    assert (one.kind, one.bytes_per_device, one.padding_bytes) == ("reduce-scatter", sent, sent - unpadded)

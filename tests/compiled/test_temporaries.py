"""The largest values of a program that are neither arguments nor results, and types as they are stored in memory."""

from __future__ import annotations

import pytest

from shardwright.compiled.text.shapes import Array, arrays_of, type_of
from shardwright.core.mesh.mesh import Mesh
from tests.compiled.reading import entry, kept, program_of

MESH = Mesh.of(fsdp=8)
FUSED = """%twice (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %inside = f32[1000]{0} broadcast(%a), dimensions={}
  ROOT %n = f32[100]{0} negate(%a)
}

%written (b: f32[50,10], c: f32[10]) -> f32[50,10] {
  %b = f32[50,10]{1,0} parameter(0)
  %c = f32[10]{0} parameter(1)
  %d = f32[1,10]{1,0} bitcast(%c)
  ROOT %e = f32[50,10]{1,0} dynamic-update-slice(%b, %d, %i)
}

"""


def found(lines: str, before: str = FUSED) -> list[tuple[int, str, tuple[int, ...], str]]:
    largest = program_of(entry(lines, before=before), MESH).memory.largest
    return [(one.bytes_per_device, one.dtype, one.shape, one.op) for one in largest]


def test_which_values_have_memory_of_their_own() -> None:
    """Not arguments, constants, aliases, values inside a fusion or written into an operand; nor the result."""
    assert found("""
      %p = f32[1000]{0} parameter(0)
      %k = f32[900]{0} constant({...})
      %f = f32[100]{0} fusion(%p), kind=kLoop, calls=%twice
      %u = (bf16[64]{0}, s32[8]{0}) custom-call(%f), custom_call_target="kernel"
      %g = bf16[64]{0} get-tuple-element(%u), index=0
      %t = bf16[8,8]{1,0} bitcast(%g)
      %s = f32[50,10]{1,0} broadcast(%zero), dimensions={}
      %w = f32[50,10]{1,0} fusion(%s, %f), kind=kLoop, calls=%written
      %y = f32[10]{0} reduce(%w, %t), dimensions={0}, to_apply=%add
      %z = f32[300]{0} broadcast(%y), dimensions={0}
    """) == [
        (2000, "float32", (50, 10), "broadcast"),
        (400, "float32", (100,), "fusion"),
        (128, "bfloat16", (64,), "custom-call"),
        (40, "float32", (10,), "reduce"),
        (32, "int32", (8,), "custom-call"),
    ]


def test_an_asynchronous_collective_counts_at_its_done() -> None:
    assert found("""
      %p = f32[8]{0} parameter(0)
      %s = ((f32[8]{0}), f32[64]{0}) all-gather-start(%p), replica_groups={}, dimensions={0}
      %d = f32[64]{0} all-gather-done(%s)
      %z = f32[8]{0} slice(%d), slice={[0:8]}
    """) == [(256, "float32", (64,), "all-gather-done")]


def test_results_that_a_fusion_writes_into_its_operands() -> None:
    """Of three results the first and the last alias operands."""
    aliasing = "output_to_operand_aliasing={{0}: (0, {}), {2}: (0, {1})}"
    assert found(f"""
      %p = f32[8]{{0}} parameter(0)
      %t = (f32[9]{{0}}, f32[10]{{0}}, f32[11]{{0}}) fusion(%p), kind=kCustom, {aliasing}, calls=%twice
      %w = f32[12]{{0}} fusion(%p), kind=kCustom, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%twice
      %z = f32[8]{{0}} negate(%p)
    """) == [(40, "float32", (10,), "fusion")]


def test_results_that_are_written_in_place_are_no_temporaries() -> None:
    """A stack that a loop writes and the step returns: neither its initial value nor the value of each iteration."""
    body = """%body (p: (s32[], f32[50,10], f32[10])) -> (s32[], f32[50,10], f32[10]) {
  %p = (s32[], f32[50,10]{1,0}, f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %s = f32[50,10]{1,0} get-tuple-element(%p), index=1
  %r = f32[10]{0} get-tuple-element(%p), index=2
  %x = f32[10]{0} negate(%r)
  %w = f32[50,10]{1,0} fusion(%s, %x), kind=kLoop, calls=%written
  ROOT %t = (s32[], f32[50,10]{1,0}, f32[10]{0}) tuple(%i, %w, %x)
}

%until (q: (s32[], f32[50,10], f32[10])) -> pred[] {
  %q = (s32[], f32[50,10]{1,0}, f32[10]{0}) parameter(0)
  ROOT %c = pred[] constant(false)
}
"""
    lines = """
      %p = f32[10]{0} parameter(0)
      %b = f32[50,10]{1,0} broadcast(%zero), dimensions={}
      %o = s32[] constant(0)
      %s = (s32[], f32[50,10]{1,0}, f32[10]{0}) tuple(%o, %b, %p)
      %l = (s32[], f32[50,10]{1,0}, f32[10]{0}) while(%s), condition=%until, body=%body
      %z = f32[50,10]{1,0} get-tuple-element(%l), index=1
    """
    assert found(lines, FUSED + body) == [(40, "float32", (10,), "negate")]


def test_equal_values_are_one_row_and_ten_rows_at_most() -> None:
    lines = ["%p = f32[8]{0} parameter(0)"]
    lines += [f"%a{number} = f32[{100 - number}]{{0}} broadcast(%p), dimensions={{}}" for number in range(12)]
    lines += ["%b = f32[100]{0} broadcast(%p), dimensions={}", "%z = f32[8]{0} negate(%p)"]
    largest = program_of(entry("\n".join(lines)), MESH).memory.largest
    assert [(one.bytes_per_device, one.num_values) for one in largest] == [
        (400, 2),
        *((4 * (100 - number), 1) for number in range(1, 10)),
    ]


def test_what_they_are() -> None:
    """Of the program with layers: what a loop keeps for the backward pass, and a value without a name."""
    largest = program_of(kept("layers.h100"), Mesh.of(fsdp=4, tensor=2), "h100:1x8").memory.largest
    kept_for_backward = next(one for one in largest if one.shape == (3, 4, 256, 512))
    assert (kept_for_backward.bytes_per_device, kept_for_backward.phase) == (3 * 1024 * 1024, "forward")
    named = [one for one in largest if one.component == "mlp"]
    assert {"dot_general", "psum"} <= {one.operation for one in named}
    assert all(one.source for one in named)


def test_on_chip_memory_of_a_tpu_is_not_main_memory() -> None:
    """Space 1 is a region of the main memory on GPU, and another memory on TPU; space 5 is the host's on both."""
    lines = """
      %p = f32[8]{{0{tile}}} parameter(0)
      %a = f32[4096]{{0{tile}S(1)}} broadcast(%p), dimensions={{}}
      %b = f32[2048]{{0{tile}S(5)}} broadcast(%p), dimensions={{}}
      %z = f32[8]{{0{tile}}} negate(%p)
    """
    assert found(lines.format(tile=":T(1024)")) == []
    assert found(lines.format(tile=":")) == [(16384, "float32", (4096,), "broadcast")]


TYPES = {
    "f32[1000,4]{1,0:T(8,128)}": 1000 * 128 * 4,
    "f32[1000,4]{0,1:T(8,128)}": 8 * 1024 * 4,
    "bf16[3,5,130]{2,1,0:T(8,128)(2,1)}": 3 * 8 * 256 * 2,
    "bf16[130]{0:T(256)}": 256 * 2,
    "pred[]{:T(512)}": 1,
    "f32[1000,4]{1,0}": 16000,
}


@pytest.mark.parametrize(("text", "num_bytes"), TYPES.items(), ids=TYPES)
def test_bytes_in_tiles(text: str, num_bytes: int) -> None:
    (array,) = arrays_of(text)
    assert array.num_bytes_laid_out == num_bytes


def test_types() -> None:
    nested = "((f32[2,3]{1,0}, token[]), /*index=1*/s4[5]{0:S(1)}, f8e4m3fn[<=8]{0})"
    first, second, third = type_of(nested)  # type: ignore[misc]
    assert first == (Array(dtype="f32", dims=(2, 3), layout="1,0"), Array(dtype="token", dims=()))
    assert isinstance(second, Array)
    assert (second.num_bytes, second.space) == (3, 1)
    assert isinstance(third, Array)
    assert third.num_bytes == 8
    assert [array.num_bytes for array in arrays_of(nested)] == [24, 3, 8]

"""Programs of `make_texts`, as compilers for CPU, TPU and GPU wrote them: what they move is worked out by hand.

| program | by hand |
|---|---|
| every_kind | 4,096 rows of 1,024 in bfloat16 a device, 8 MiB; the matrix 4 MiB; products of 4,096 x 2,048, 16 MiB |
| layers | three layers; a matrix is 512 x 512 on a device once gathered, 512 KiB; 1,024 tokens of 512, 1 MiB |
| windowed | an eighth of a matrix of 8 MiB |
| codes | three products of 4,096 x 1,024 codes with 2,048 x 1,024 |
| kernel | 8 rows of 4 heads, 1,024 x 128, 8 MiB |
| slices | a matrix of 1,024 x 1,024, 2 MiB, and an eighth of it |
"""

from __future__ import annotations

import pytest

from shardwright.core.mesh.mesh import Axis, Mesh
from tests.compiled.reading import bytes_by_kind, kept, only, program_of

KIB, MIB = 1024, 1024 * 1024
EXPERTS, TENSOR = Mesh.of(data=1, fsdp=2, expert=4), Mesh.of(fsdp=4, tensor=2)
BOTH, EXPERT, FSDP = ("fsdp", "expert"), ("expert",), ("fsdp",)
ROW_OF_FLOATS = 2 * 2048
"""Bytes of a row of the products."""

ONE_OF_EACH = {
    ("all-to-all", EXPERT): 8 * MIB,
    ("permute", EXPERT): 8 * MIB,
    ("all-gather", BOTH): 4 * MIB,
    ("reduce-scatter", FSDP): 16 * MIB,
    ("all-reduce", BOTH): 4,
}


@pytest.mark.parametrize("target", ["tpu7x", "h100"])
def test_one_of_each_kind(target: str) -> None:
    program = program_of(kept(f"every_kind.{target}"), EXPERTS, target)
    assert bytes_by_kind(program) == ONE_OF_EACH
    assert all((one.count_per_step, one.num_ops, one.in_loop) == (1, 1, False) for one in program.collectives)
    assert {one.component for one in program.collectives} == {"moe"}
    (gather,) = [one for one in program.collectives if one.kind == "all-gather"]
    assert (gather.tensors, gather.operation, gather.shape) == (("layers.moe.up",), "all_gather", (1024, 2048))
    assert (gather.group_size, gather.dtypes) == (8, ("bfloat16",))
    assert program.flops_per_device == 2 * 4096 * 1024 * 2048


@pytest.mark.parametrize(("target", "of_blocks"), [("h100", "float32"), ("b200", "float8_e4m3fn")])
def test_products_of_codes_and_of_values(target: str, of_blocks: str) -> None:
    """Of block scales XLA multiplies codes on B200 only, and silently values in float32 on H100."""
    program = program_of(kept(f"codes.{target}"), Mesh.of(fsdp=8), target)
    found = {one.tensors: {*one.dtypes} for one in program.products}
    assert found == {
        ("layers.mlp.gate",): {"float8_e4m3fn"},
        ("layers.mlp.up",): {of_blocks},
        ("layers.mlp.down",): {"bfloat16"},
    }
    assert {(one.component, one.num_ops) for one in program.products} == {("mlp", 1)}
    assert program.flops_per_device == 3 * 2 * 4096 * 1024 * 2048


def test_a_reduce_scatter_that_is_padded_and_corrected() -> None:
    """v5p pads 4,096 rows to 4,144, and permutes 24 of them to the neighbour."""
    program = program_of(kept("every_kind.v5p"), EXPERTS)
    padding = 48 * ROW_OF_FLOATS
    expected = {**ONE_OF_EACH, ("permute", FSDP): 24 * ROW_OF_FLOATS}
    expected["reduce-scatter", FSDP] += padding
    assert bytes_by_kind(program) == expected
    scatter, repair = (one for one in program.collectives if one.axes == FSDP)
    assert (scatter.padding_bytes, scatter.shape) == (padding, (2072, 2048))
    # The compiler kept a name for neither: their origin is that of the summed operand, and of the permuted rows.
    assert (scatter.component, scatter.operation, scatter.stands_for) == ("moe", "reduce_scatter", None)
    assert (repair.component, repair.operation, repair.stands_for) == ("moe", None, "reduce-scatter")
    assert program.flops_per_device == 2 * 4096 * 1024 * 2048


def test_cpu_sends_floats_of_32_bits() -> None:
    program = program_of(kept("every_kind.cpu"), EXPERTS, "cpu:8")
    assert bytes_by_kind(program) == {key: 2 * size if size > 4 else size for key, size in ONE_OF_EACH.items()}
    assert {one.dtypes for one in program.collectives} == {("float32",)}
    assert {one.overlapped for one in program.collectives} == {None}


def test_what_overlaps() -> None:
    """Between the gather's start and its done, H100 has an addition and other collectives, which are no products; v5p waits at once."""
    on_gpu = program_of(kept("every_kind.h100"), EXPERTS, "h100:1x8").collectives
    assert {one.overlapped for one in on_gpu} == {False}
    assert not any(one.overlapped for one in program_of(kept("every_kind.v5p"), EXPERTS).collectives)


LAYERS = {
    ("all-gather", FSDP): 3 * 2 * 2 * 512 * KIB,
    ("reduce-scatter", FSDP): 3 * 2 * 512 * KIB,
    ("all-reduce", ("tensor",)): 3 * 2 * MIB,
    ("all-reduce", ("fsdp", "tensor")): 4,
}


@pytest.mark.parametrize("target", ["v5e", "h100", "cpu"])
def test_layers(target: str) -> None:
    """Two matrices are gathered in each layer forward and again in its recomputation, and their gradients scattered.

    H100 gathers both in one instruction, which has a name for each, and peels the last iteration off its loop; v5e does
    one gather in steps, each of which is written as the complete gather.
    """
    program = program_of(kept(f"layers.{target}"), TENSOR, target)
    wider = 2 if target == "cpu" else 1
    assert bytes_by_kind(program) == {key: size * (wider if size > 4 else 1) for key, size in LAYERS.items()}
    counts: dict[tuple[str, str | None, tuple[str, ...]], int] = {}
    for one in program.collectives:
        assert one.component == ("loss" if one.axes == ("fsdp", "tensor") else "mlp")
        key = (one.kind, one.phase, one.tensors)
        counts[key] = counts.get(key, 0) + one.count_per_step
    each = [(f"layers.mlp.{name}",) for name in ("up", "down")]
    assert counts == {
        **{("all-gather", phase, name): 3 for phase in ("forward", "recompute") for name in each},
        **{("reduce-scatter", "backward", name): 3 for name in each},
        **{("all-reduce", phase, ("mlp.out",)): 3 for phase in ("forward", "backward")},
        ("all-reduce", "update", ()): 1,
    }
    # Two products forward, one of them recomputed, and two for each backward; 1,024 tokens, 512 x 512 on a device.
    assert program.flops_per_device == 3 * (2 + 1 + 4) * 2 * 1024 * 512 * 512
    assert program.component_flops == {"mlp": program.flops_per_device}


def test_a_gather_that_is_done_in_steps_overlaps() -> None:
    text = kept("layers.v5e")
    assert text.count("AsyncCollectiveStart") == 1
    assert text.count("async_collective_fusion_config") > 2
    (in_steps,) = [one for one in program_of(text, TENSOR).collectives if one.overlapped]
    assert (in_steps.kind, in_steps.tensors, in_steps.count_per_step) == ("all-gather", ("layers.mlp.down",), 3)


def test_lines_of_source() -> None:
    found = {one.source for one in program_of(kept("layers.h100"), TENSOR).collectives if one.kind == "all-reduce"}
    source = (kept("layers.h100").partition("FileNames\n1 ")[2]).partition("\n")[0].strip('"')
    assert found == {f"{source}:{line}" for line in (87, 95)}


def test_permutes_in_place_of_a_gather() -> None:
    """In both directions, two steps per iteration in a loop with bound 4 and step 2, and one step before it."""
    text = kept("windowed.v5e")
    program = program_of(text, Mesh.of(fsdp=8), "v5e:2x4")
    assert "constant(4)" in text
    assert "known_trip_count" not in text
    assert bytes_by_kind(program) == {("permute", FSDP): 9 * MIB}
    assert {one.stands_for for one in program.collectives} == {"all-gather"}
    assert sorted(one.count_per_step for one in program.collectives) == [1, 4, 4]
    assert program.flops_per_device == 2 * 2048 * 1024 * 4096


def test_collectives_after_a_kernel_with_attributes_over_several_lines() -> None:
    text = kept("kernel.v5p")
    assert "\n}}, metadata=" in text
    program = program_of(text, Mesh.of(fsdp=8))
    exchanged = [one for one in program.collectives if one.kind == "all-to-all"]
    assert [(one.phase, one.bytes_per_device, one.count_per_step) for one in exchanged] == [
        ("forward", 8 * MIB, 3),
        ("backward", 8 * MIB, 3),
    ]
    # Such a small gradient is all-reduced, and each device slices its shard.
    (scatter,) = [one for one in program.collectives if one.kind == "all-reduce"]
    assert (scatter.stands_for, scatter.operation, scatter.users) == (
        "reduce-scatter",
        "reduce_scatter",
        ("dynamic-slice",),
    )


@pytest.mark.parametrize("target", ["v5p", "h100"])
def test_as_many_rows_as_there_are(target: str) -> None:
    """The larger of the two buffers, 640 rows; H100 kept no name, but the operand has one."""
    exchange = only(program_of(kept(f"ragged.{target}"), EXPERTS, target))
    assert (exchange.kind, exchange.ragged, exchange.axes) == ("all-to-all", True, EXPERT)
    assert (exchange.bytes_per_device, exchange.component) == (640 * 256 * 2, "moe")


def test_names_and_groups_of_a_partitioned_program() -> None:
    """Merged collectives of XLA's partitioner: groups along axes of its mesh, and sums without a name."""
    text = kept("partitioned.h100")
    assert "replica_groups=mesh[" in text
    program = program_of(text, TENSOR, "h100:1x8")
    assert bytes_by_kind(program) == {
        ("all-gather", FSDP): 2 * 2 * 2 * 512 * KIB,
        ("reduce-scatter", FSDP): 2 * 2 * 512 * KIB,
        ("all-reduce", ("tensor",)): 2 * 2 * MIB,
    }
    scatters = [one for one in program.collectives if one.kind == "reduce-scatter"]
    assert {(one.component, one.phase) for one in scatters} == {("mlp", "backward")}


@pytest.mark.parametrize("target", ["v5p", "v5e"])
@pytest.mark.parametrize(
    "mesh", [Mesh.of(data=2, fsdp=8), Mesh((Axis(name="fsdp", size=8), Axis(name="data", size=2, link="dcn")))]
)
def test_collectives_across_slices(target: str, mesh: Mesh) -> None:
    """A send and a recv in the text, which count as one collective. On v5p the sum inside a slice is an all-reduce."""
    program = program_of(kept(f"slices.{target}"), mesh, f"{target}:2x2x2*2")
    sums = "reduce-scatter" if target == "v5e" else "all-reduce"
    assert bytes_by_kind(program) == {
        ("all-gather", FSDP): 2 * MIB,
        (sums, FSDP): 2 * MIB,
        ("all-reduce", ("data",)): 2 * MIB // 8,
    }
    across, *_ = (one for one in program.collectives if one.axes == ("data",))
    assert (across.across_slices, across.group_size, across.phase) == (True, 2, "backward")
    (inside,) = [one for one in program.collectives if one.kind == sums and one.axes == FSDP]
    assert inside.stands_for == (None if target == "v5e" else "reduce-scatter")

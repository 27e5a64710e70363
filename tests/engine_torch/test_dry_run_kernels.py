"""A dry run holds what kernels of a GPU hold: their results, codes of operands, and values of codes only where a chip has no product of these."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from shardwright import Request, load_layout, make_plan, model_table
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Chip
from shardwright.engine_torch.dry_run.dry_run import dry_run
from shardwright.engine_torch.dry_run.held import Held
from shardwright.engine_torch.dry_run.kernels import kernels_of_a_gpu
from shardwright.engine_torch.io.fused import fused
from shardwright.engine_torch.io.private import without_values

ROWS, LENGTH = 16, 512
B200, H100, A100 = (
    Chip(name=name, usable_bytes=80 * 2**30, source="here", capability=capability)
    for name, capability in (("a B200", (10, 0)), ("an H100", (9, 0)), ("an A100", (8, 0)))
)


@cache
def peak(chip: Chip, recipe: str | None) -> int:
    """Of a rank's step whose layers hold more than its loss."""
    request = Request(
        layout=load_layout("fsdp"),
        table=model_table("llama3-test"),
        mesh_sizes={"fsdp": 4},
        engine="torch",
        batch=ROWS,
        length=LENGTH,
        dtype="bfloat16",
        loss_chunks=16,
        chip=chip,
        precision=None if recipe is None else preset(recipe),
    )
    return dry_run(make_plan(request)).peak_bytes


@pytest.mark.parametrize(
    ("chip", "recipe"),
    [
        (H100, "fp8-current"),
        (H100, "fp8-block"),
        (H100, "mxfp8"),
        (A100, "fp8-current"),
        (B200, "mxfp8"),
        pytest.param(B200, "fp8-block", marks=pytest.mark.matrix),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_products_of_codes_are_those_of_the_chip(chip: Chip, recipe: str) -> None:
    """Operands of a product, as codes, are less than cotangents that a layer has at other moments. As values in float32 they are more."""
    more = peak(chip, recipe) - peak(chip, None)
    values = ROWS // 4 * LENGTH * model_table("llama3-test").sizes["mlp"] * 4
    if (chip, recipe) in ((H100, "mxfp8"), (A100, "fp8-current")):
        assert more >= values
    else:
        assert 0 <= more < 1024


@pytest.mark.matrix
def test_experts_have_one_call_for_all_of_them() -> None:
    """Also where nothing has values, as here."""
    request = Request(
        layout=load_layout("fsdp"),
        table=model_table("mixtral-test"),
        mesh_sizes={"fsdp": 4},
        engine="torch",
        batch=8,
        length=128,
        dtype="bfloat16",
        chip=B200,
        precision=preset("mxfp8"),
    )
    on_an_h100 = replace(request, chip=H100)
    assert dry_run(make_plan(request)).peak_bytes < dry_run(make_plan(on_an_h100)).peak_bytes


def several(x: torch.Tensor, number: int) -> tuple[torch.Tensor, tuple[torch.Tensor, int]]:
    wide = x.double().exp().T
    return wide.float(), (wide.sum().to(torch.bfloat16), number)


def test_a_kernel_holds_its_results_alone() -> None:
    held = Held()
    with without_values(), kernels_of_a_gpu(held), held.watching():
        for number in (7, 7, 8):
            x = torch.zeros(4, 6)
            before = held.now
            wide, (total, same) = fused(several)(x, number)
            assert held.now - before == 4 * 24 + 2
            assert held.peak == held.now
            assert (wide.shape, wide.dtype, total.shape, total.dtype) == ((6, 4), torch.float32, (), torch.bfloat16)
            assert wide.is_contiguous()
            assert same == number
            del wide, total
        with held.for_shapes():
            with held.for_shapes():
                held.add(torch.zeros(100))
            before = held.now
            held.add(torch.zeros(100))
            assert held.now == before
        assert fused(several)(torch.zeros(4, 6), True)[1][1] is True
        assert fused(several)(torch.zeros(4, 6), 1)[1][1] is not True
    assert fused(several)(torch.zeros(2, 2), 1)[0].tolist() == [[1, 1], [1, 1]]

"""The attention kernels of real models under their layouts on each backend, and that the table in words is complete."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from shardwright.core.plan import attention_kernels
from shardwright.core.plan.attention_kernels import (
    KERNELS,
    LARGEST_BLOCK,
    NEEDS,
    SCORES_OF_BLOCK,
    Backend,
    LocalAttention,
    block_of,
    choose_attention,
    local_attention,
)
from tests.cost.plans import plan_of

LLAMA = plan_of("llama3-405b", "hsdp", mesh_sizes={"data": 8, "fsdp": 64}, batch=512, length=8192)
GATHERED = plan_of("deepseek3-671b", "ep-as-cp", mesh_sizes={"fsdp": 64, "expert": 8}, batch=64)
BALANCED = plan_of("deepseek3-671b", "ep-as-cp", mesh_sizes={"fsdp": 64, "expert": 8}, batch=64, load_balanced=True)
PLANS = {
    "405b": LLAMA,
    "671b, unsharded rows": plan_of("deepseek3-671b", "fsdp", mesh_sizes={"fsdp": 512}, batch=512),
    "671b, gathered": GATHERED,
    "671b, balanced": BALANCED,
    "671b, around a ring": plan_of(
        "deepseek3-671b", "ep-as-cp", move_attention="ring", mesh_sizes={"fsdp": 64, "expert": 8}, batch=64
    ),
    "671b, heads for tokens": plan_of(
        "deepseek3-671b", "ep-as-cp", move_attention="ulysses", mesh_sizes={"fsdp": 64, "expert": 8}, batch=64
    ),
    "8b, gathered": plan_of("llama3-8b", "cp", mesh_sizes={"fsdp": 2, "context": 4}, batch=8, length=8192),
    "8b in float32": plan_of("llama3-8b", "fsdp", mesh_sizes={"fsdp": 8}, batch=8, length=8192, dtype="float32"),
    "8b, odd rows": plan_of("llama3-8b", "fsdp", mesh_sizes={"fsdp": 8}, batch=8, length=3001),
    "8b, long rows": plan_of("llama3-8b", "fsdp", mesh_sizes={"fsdp": 8}, batch=8, length=16384),
    "8b, short rows": plan_of("llama3-8b", "fsdp", mesh_sizes={"fsdp": 8}, batch=8, length=128),
}
EXPECTED = {
    "405b": ("blockwise", "splash", "triton", "cudnn"),
    "671b, unsharded rows": ("blockwise", "splash", "triton", "triton"),
    "671b, gathered": ("blockwise", "splash", "blockwise", "blockwise"),
    "671b, balanced": ("blockwise", "splash", "blockwise", "blockwise"),
    "671b, around a ring": ("blockwise", "blockwise", "blockwise", "blockwise"),
    "671b, heads for tokens": ("blockwise", "splash", "triton", "triton"),
    "8b, gathered": ("blockwise", "splash", "blockwise", "cudnn"),
    "8b in float32": ("blockwise", "splash", "blockwise", "blockwise"),
    "8b, odd rows": ("blockwise", "blockwise", "blockwise", "blockwise"),
    "8b, long rows": ("blockwise", "splash", "triton", "triton"),
    "8b, short rows": ("full", "full", "full", "full"),
}
"""On CPU, on TPU, on a GPU without cuDNN and on one with it."""


@pytest.mark.parametrize("case", PLANS)
def test_each_backend_uses_its_fastest_kernel(case: str) -> None:
    attention = local_attention(PLANS[case])
    assert attention is not None
    assert tuple(choose_attention(backend, attention).name for backend in get_args(Backend)) == EXPECTED[case]


def test_the_attention_of_one_device_is_read_from_the_plan() -> None:
    assert local_attention(LLAMA) == LocalAttention(
        rows=1, queries=8192, keys=8192, heads=128, width=128, value_width=128, dtype="bfloat16"
    )
    gathered = LocalAttention(rows=1, queries=512, keys=4096, heads=128, width=192, value_width=128, dtype="bfloat16")
    assert local_attention(GATHERED) == gathered
    assert local_attention(BALANCED) == replace(gathered, in_order=False)
    microbatched = plan_of("llama3-405b", "fsdp-tp", mesh_sizes={"fsdp": 64, "tensor": 8}, batch=512, microbatches=4)
    attention = local_attention(microbatched)
    assert attention is not None
    assert (attention.rows, attention.heads) == (2, 16)


def test_the_unmet_needs_of_a_faster_kernel_are_reported() -> None:
    attention = local_attention(BALANCED)
    assert attention is not None
    assert choose_attention("gpu with cuDNN", attention).lacking == {
        "cudnn": ("one width of at most 128, a multiple of 8",),
        "triton": ("queries that are all the tokens of a row, in order",),
    }
    assert choose_attention("tpu", replace(attention, ring=True)).lacking == {"splash": ("all keys at once (no ring)",)}


@pytest.mark.parametrize("need", NEEDS)
def test_every_need_is_one_that_a_case_can_lack(need: str) -> None:
    good = LocalAttention(rows=1, queries=1024, keys=1024, heads=8, width=128, value_width=128, dtype="bfloat16")
    bad = [
        replace(good, ring=True),
        replace(good, queries=512),
        replace(good, in_order=False),
        replace(good, queries=1001, keys=1001),
        replace(good, dtype="float16"),
        replace(good, dtype="float32"),
        replace(good, width=320),
        replace(good, queries=1 << 16, keys=1 << 16),
    ]
    assert NEEDS[need](good)
    assert not all(NEEDS[need](case) for case in bad)
    assert any(need in kernel.needs for kernel in KERNELS)


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("heads", [1, 16, 128, 1024])
def test_a_block_is_as_large_as_its_scores_permit(backend: Backend, heads: int) -> None:
    block = block_of(backend, heads)
    assert 128 <= block <= LARGEST_BLOCK[backend]
    assert block == 128 or heads * block**2 <= SCORES_OF_BLOCK
    assert block == LARGEST_BLOCK[backend] or heads * (2 * block) ** 2 > SCORES_OF_BLOCK


def test_the_table_in_words_has_every_kernel() -> None:
    text = attention_kernels.__doc__ or ""
    for name in ("full", *(kernel.name for kernel in KERNELS), "blockwise"):
        assert f"\n| {name} |" in text

"""Grouped products, by blocks and by the kernel, against each row times the matrices of its own expert."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.core.plan.attention_kernels import Backend
from shardwright.core.plan.expert_kernels import ExpertKernel, choose_expert_kernel
from shardwright.engine_jax.experts.grouped import _backward_by_kernel, _forward_by_kernel, grouped_swiglu
from shardwright.engine_jax.experts.grouped_blocks import Matrices, backward_in_blocks, forward_in_blocks
from tests.matrix import some

ROWS, EMBED, WIDTH, EXPERTS = 40, 6, 10, 4
NAMES = ("moe.gate", "moe.up")
SIZES = [[9, 0, 17, 5], [0, 0, 0, 0], [40, 0, 0, 0], [10, 10, 10, 10], [0, 1, 0, 39]]
KERNEL_ROWS = 128
KERNELS = {
    "blocks": (ROWS, forward_in_blocks, backward_in_blocks),
    # TPU's kernel, interpreted by Pallas.
    "megablox": (
        KERNEL_ROWS,
        partial(_forward_by_kernel, interpret=True),
        partial(_backward_by_kernel, interpret=True),
    ),
}


def kernel_of(backend: Backend, rows: int) -> ExpertKernel:
    return choose_expert_kernel(backend, buffer_rows=rows, experts=EXPERTS, dtype="float32")


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(0, 0.5, shape).astype(np.float32)


@pytest.fixture(scope="module")
def experts() -> Matrices:
    return Matrices(*map(jnp.asarray, (drawn(4, EMBED, WIDTH), drawn(EXPERTS, EMBED, WIDTH), drawn(4, WIDTH, EMBED))))


def row_by_row(rows_RM, experts: Matrices, sizes: list[int]) -> jax.Array:
    """The definition, on the rows that experts own."""
    out = []
    for row, expert in enumerate(np.repeat(np.arange(EXPERTS), sizes)):
        x_M = rows_RM[row]
        out.append(
            (jax.nn.silu(x_M @ experts.gate_EMF[expert]) * (x_M @ experts.up_EMF[expert])) @ experts.down_EFM[expert]
        )
    return jnp.stack(out) if out else jnp.zeros((0, EMBED))


@pytest.mark.parametrize("sizes", some(SIZES, (0, 1, 2)), ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_each_row_is_multiplied_with_its_own_expert(name: str, sizes: list[int], experts: Matrices) -> None:
    buffer_rows, forward, backward = KERNELS[name]
    kernel = kernel_of("cpu" if name == "blocks" else "tpu", buffer_rows)
    assert kernel.name == name
    owned = sum(sizes)
    # Rows after the experts' rows must have no effect: NaN would show one.
    is_after = jnp.arange(buffer_rows)[:, None] >= owned
    rows_RM = jnp.where(is_after, jnp.nan, drawn(buffer_rows, EMBED))
    d_out_RM = jnp.where(is_after, jnp.nan, drawn(buffer_rows, EMBED + 1)[:, 1:])

    expected, pull = jax.vjp(lambda rows, matrices: row_by_row(rows, matrices, sizes), rows_RM, experts)
    d_rows, d_experts = pull(d_out_RM[:owned])
    sizes_E = jnp.asarray(sizes, jnp.int32)
    out_RM, hidden = jax.jit(partial(forward, kernel=kernel))(rows_RM, experts, sizes_E)
    our_rows, our_experts = jax.jit(partial(backward, kernel=kernel))(rows_RM, experts, sizes_E, hidden, d_out_RM)
    np.testing.assert_allclose(out_RM[:owned], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(our_rows[:owned], d_rows[:owned], rtol=0, atol=1e-5)
    for our, their in zip(our_experts, d_experts, strict=True):
        np.testing.assert_allclose(our, their, rtol=0, atol=1e-5)


def test_on_this_backend_only_blocks_with_rows_are_computed(experts: Matrices) -> None:
    sizes_E = jnp.asarray([9, 0, 17, 5], jnp.int32)
    rows_RM = jnp.asarray(drawn(ROWS, EMBED))
    kernel = kernel_of("cpu", ROWS)
    assert kernel.rows == 8
    text = (
        jax.jit(jax.grad(lambda rows: jnp.sum(grouped_swiglu(rows, experts, sizes_E, kernel, NAMES))))
        .lower(rows_RM)
        .as_text()
    )
    assert "stablehlo.while" in text
    np.testing.assert_allclose(
        jax.jit(grouped_swiglu, static_argnums=(3, 4))(rows_RM, experts, sizes_E, kernel, NAMES)[:31],
        row_by_row(rows_RM, experts, [9, 0, 17, 5]),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize(("platform", "rows", "loops"), [("tpu", 128, False), ("tpu", 40, True), ("cuda", 128, True)])
def test_elsewhere_a_kernel_or_larger_blocks(platform: str, rows: int, loops: bool, experts: Matrices) -> None:
    """Lowered on this machine for other platforms. The kernel needs tiles of rows that divide the buffer."""
    sizes_E = jnp.asarray([10, 10, 10, 10], jnp.int32)

    kernel = kernel_of("tpu" if platform == "tpu" else "gpu", rows)

    def cotangent(rows_RM):
        return jax.grad(lambda rows, matrices: jnp.sum(grouped_swiglu(rows, matrices, sizes_E, kernel, NAMES)), (0, 1))(
            rows_RM, experts
        )

    text = jax.jit(cotangent).trace(jnp.asarray(drawn(rows, EMBED))).lower(lowering_platforms=(platform,)).as_text()
    assert "ragged_dot" not in text
    assert ("tpu_custom_call" in text) != loops
    assert ("stablehlo.dot_general" in text) == loops


def test_half_precision_accumulates_in_float32(experts: Matrices) -> None:
    half = Matrices(*(matrix.astype(jnp.bfloat16) for matrix in experts))
    rows_RM = jnp.asarray(drawn(ROWS, EMBED), jnp.bfloat16)
    sizes_E = jnp.asarray([9, 0, 17, 5], jnp.int32)
    kernel = kernel_of("cpu", ROWS)
    d_half = jax.jit(
        jax.grad(lambda matrices: jnp.sum(grouped_swiglu(rows_RM, matrices, sizes_E, kernel, NAMES)[:31]))
    )(half)
    full = Matrices(*(matrix.astype(jnp.float32) for matrix in half))
    d_full = jax.grad(lambda matrices: jnp.sum(row_by_row(rows_RM.astype(jnp.float32), matrices, [9, 0, 17, 5])))(full)
    for our, their in zip(d_half, d_full, strict=True):
        assert our.dtype == jnp.bfloat16
        np.testing.assert_allclose(our.astype(jnp.float32), their, rtol=0.05, atol=0.05)

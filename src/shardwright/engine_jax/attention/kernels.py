"""Attention by the kernels of accelerators that JAX ships. Each takes the attention mask in its own form.

``core/plan/attention_kernels.py`` chooses the kernel of a device and lists what each kernel needs.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim, E value dim; X and Y are blocks of
queries and of keys.
"""

from __future__ import annotations

import warnings
from functools import partial
from math import gcd
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.installed import installed_version
from shardwright.core.plan.attention_kernels import Backend
from shardwright.engine_jax.attention.scores import AttentionMask, VisibleRange
from shardwright.engine_jax.io.recomputation import ATTENDED

SPLASH_BLOCK = 512
"""Tokens of a block on TPU: with head dim 256 in float32, forward and backward fit the vector memory of every chip."""

TRITON_ROWS = {128: 128, 256: 64}
"""Tokens of a block in the forward pass, by the largest head dim for which they fit 227 KB of shared memory."""
TRITON_ROWS_BACKWARD = 32
"""Tokens of a block in the backward pass, which holds three times as much."""
CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def backend_of(mesh: jax.sharding.Mesh) -> Backend:
    """The backend of a mesh, whose devices may exist or only be compiled for. An unknown platform counts as ``cpu``."""
    match mesh.devices.flat[0].platform:
        case "tpu":
            return "tpu"
        case "gpu" | "cuda":
            return "gpu with cuDNN" if any(installed_version(package) for package in CUDNN_PACKAGES) else "gpu"
        case _:
            return "cpu"


def splash(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    mask: AttentionMask,
    scale: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """JAX's Pallas kernel for TPU. Keys are in the order of the text, and ``mask`` has a ``visible_range``."""
    # Imported here, because Pallas takes a while to load and only accelerators need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    queries, keys = gcd(q_BTHD.shape[1], SPLASH_BLOCK), gcd(k_BSKD.shape[1], SPLASH_BLOCK)
    sizes = kernel.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array, AttentionMask]) -> jax.Array:
        q_THD, k_SKD, v_SKE, mask = row
        assert mask.visible_range is not None
        computed_XY = _blocks_to_compute(mask.visible_range, queries, keys, k_SKD.shape[0])
        by_query = _mask_info(computed_XY, mask.visible_range, axis=1)
        attend = kernel.SplashAttentionKernel(
            by_query,
            by_query,
            _mask_info(computed_XY, mask.visible_range, axis=0),
            block_sizes=sizes,
            is_mqa=False,
            save_residuals=False,
            mask_value=kernel.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name=ATTENDED,
            mask_function=_up_to_last,
            interpret=interpret,
        )
        segments = kernel.SegmentIds(q=mask.segments_BT, kv=mask.kv_segments_BS)
        # The kernel takes no scale.
        scaled_THD = (q_THD * scale).astype(q_THD.dtype)
        out_HTE = attend(scaled_THD.swapaxes(0, 1), k_SKD.swapaxes(0, 1), v_SKE.swapaxes(0, 1), segments)
        assert not isinstance(out_HTE, tuple)
        return out_HTE.swapaxes(0, 1)

    # One row after the other: each row skips other blocks.
    return jax.lax.map(of_row, (q_BTHD, k_BSKD, v_BSKE, mask))


def _up_to_last(last: jax.Array, key: jax.Array) -> jax.Array:
    return last >= key


def _blocks_to_compute(visible_range: VisibleRange, queries: int, keys: int, length: int) -> jax.Array:
    """The blocks in which a query may attend to a key, XY."""
    first_X1 = jnp.min(visible_range.first_BT.reshape(-1, queries), axis=1, keepdims=True) // keys
    last_X1 = jnp.max(visible_range.last_BT.reshape(-1, queries), axis=1, keepdims=True) // keys
    block_1Y = jnp.arange(length // keys)[None]
    return (first_X1 <= block_1Y) & (block_1Y <= last_X1)


def _mask_info(computed_XY: jax.Array, visible_range: VisibleRange, axis: int):
    """The kernel's form of ``computed_XY``: which blocks are computed, and which block is in memory at each.

    ``axis``: the one along which the kernel iterates. While a block is skipped, its computed neighbour stays in memory, so
    that nothing is fetched for the skipped one.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    num = computed_XY.shape[axis]
    first = jnp.argmax(computed_XY, axis=axis, keepdims=True)
    last = num - 1 - jnp.argmax(jnp.flip(computed_XY, axis), axis=axis, keepdims=True)
    block = jax.lax.broadcasted_iota(jnp.int32, computed_XY.shape, axis)
    return MaskInfo(
        data_next=jnp.clip(block, first, last).astype(jnp.int32)[None],
        mask_next=None,
        block_mask=computed_XY.astype(jnp.int8)[None],
        partial_mask_blocks=None,
        # Declared as a NumPy array; the kernel only broadcasts it.
        q_sequence=cast(Any, visible_range.last_BT),
    )


def triton(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    mask: AttentionMask,
    scale: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """JAX's Pallas kernel for NVIDIA GPUs. Queries are all the tokens of a row, in the order of the text."""
    with warnings.catch_warnings():
        # JAX 0.11 ships it and says that a later version will not.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as kernel

    B, T, H, D = q_BTHD.shape
    K, E = v_BSKE.shape[2:]
    rows = next(rows for widest, rows in TRITON_ROWS.items() if widest >= D)
    sizes = kernel.BlockSizes(
        block_q=rows,
        block_k=rows,
        block_q_dkv=TRITON_ROWS_BACKWARD,
        block_kv_dkv=TRITON_ROWS_BACKWARD,
        block_q_dq=TRITON_ROWS_BACKWARD,
        block_kv_dq=TRITON_ROWS_BACKWARD,
    )
    # The kernel has one width for keys and values.
    v_BSKD = jnp.pad(v_BSKE, ((0, 0), (0, 0), (0, 0), (0, D - E)))

    # Scale, causal, sizes, backward pass, warps, stages, grid, interpreted, debug.
    options = scale, True, sizes, "triton", None, 2, None, interpret, False

    def of_group(q_BTKD: jax.Array) -> jax.Array:
        return _named_mha(kernel.mha, options, q_BTKD, k_BSKD, v_BSKD, mask.segments_BT)

    # Mapped over the heads that share a KV head, so that the KV head is not repeated.
    out_BTKGD = jax.vmap(of_group, in_axes=3, out_axes=3)(q_BTHD.reshape(B, T, K, H // K, D))
    return out_BTKGD.reshape(B, T, H, D)[..., :E]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _named_mha(mha: Any, options: tuple[Any, ...], q_BTKD, k_BSKD, v_BSKD, segments_BT) -> jax.Array:
    """JAX's kernel, whose output and sums have the name by which a layer keeps them: its own rule gives them none."""
    return mha(q_BTKD, k_BSKD, v_BSKD, segments_BT, *options)


def _named_mha_forward(mha: Any, options: tuple[Any, ...], *operands):
    named = checkpoint_name(mha(*operands, *options, return_residuals=True), ATTENDED)
    return named[0], (*operands, *named)


def _named_mha_backward(mha: Any, options: tuple[Any, ...], kept, d_out_BTKD: jax.Array):
    return mha.bwd(*options, False, kept, d_out_BTKD)


_named_mha.defvjp(_named_mha_forward, _named_mha_backward)


def cudnn(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, *, causal: bool = False
) -> jax.Array:
    """cuDNN's kernel for NVIDIA GPUs. ``causal``: queries are all the tokens of a row, in the order of the text."""
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BSKD,
        v_BSKE,
        mask=mask.visible()[:, None],
        scale=scale,
        is_causal=causal,
        implementation="cudnn",
    )

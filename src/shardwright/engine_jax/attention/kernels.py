"""Attention by the kernels of an accelerator, as JAX ships them: each told in its own way what a query sees.

Which of them a device uses the core has chosen (``core/plan/attention_kernels.py``), with all that they need.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim; X and Y blocks of
queries and of keys.
"""

from __future__ import annotations

from math import gcd
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardwright.core.installed import installed_version
from shardwright.core.plan.attention_kernels import Backend
from shardwright.engine_jax.attention.scores import AttentionMask, Reach

SPLASH_BLOCK = 512
"""Tokens of a block on TPU: with 256 wide heads in float32, forward and backward fit the vector memory of every chip."""

TRITON_ROWS = {128: 128, 256: 64}
"""Tokens of a block forward, by the widest head that has room for them in 227 KB of shared memory."""
TRITON_ROWS_BACK = 32
"""Tokens of a block backward, which holds three times as much."""
CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def backend_of(mesh: jax.sharding.Mesh) -> Backend:
    """What a mesh is of, to be there or only to be compiled for. One that is not known has no kernels of its own."""
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
    """TPU's. Keys lie in the order of the text, and ``mask.reach`` says between which of them a query's are."""
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
        assert mask.reach is not None
        run_XY = _run(mask.reach, queries, keys, k_SKD.shape[0])
        by_query = _told(run_XY, mask.reach, axis=1)
        attend = kernel.SplashAttentionKernel(
            by_query,
            by_query,
            _told(run_XY, mask.reach, axis=0),
            block_sizes=sizes,
            is_mqa=False,
            save_residuals=False,
            mask_value=kernel.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name=None,
            mask_function=_not_after,
            interpret=interpret,
        )
        segments = kernel.SegmentIds(q=mask.segments_BT, kv=mask.kv_segments_BS)
        # It has no scale of its own.
        scaled_THD = (q_THD * scale).astype(q_THD.dtype)
        out_HTE = attend(scaled_THD.swapaxes(0, 1), k_SKD.swapaxes(0, 1), v_SKE.swapaxes(0, 1), segments)
        assert not isinstance(out_HTE, tuple)
        return out_HTE.swapaxes(0, 1)

    # Rows in turn: each has blocks of its own to pass over.
    return jax.lax.map(of_row, (q_BTHD, k_BSKD, v_BSKE, mask))


def _not_after(last: jax.Array, key: jax.Array) -> jax.Array:
    return last >= key


def _run(reach: Reach, queries: int, keys: int, length: int) -> jax.Array:
    """In which blocks a query may see a key, XY."""
    first_X1 = jnp.min(reach.first_BT.reshape(-1, queries), axis=1, keepdims=True) // keys
    last_X1 = jnp.max(reach.last_BT.reshape(-1, queries), axis=1, keepdims=True) // keys
    block_1Y = jnp.arange(length // keys)[None]
    return (first_X1 <= block_1Y) & (block_1Y <= last_X1)


def _told(run_XY: jax.Array, reach: Reach, axis: int):
    """The same in the kernel's terms: which blocks are computed, and which one is in memory meanwhile.

    ``axis``: along which blocks follow each other. In place of one that is passed over its neighbour stays, so that
    nothing is fetched for it.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    num = run_XY.shape[axis]
    first = jnp.argmax(run_XY, axis=axis, keepdims=True)
    last = num - 1 - jnp.argmax(jnp.flip(run_XY, axis), axis=axis, keepdims=True)
    block = jax.lax.broadcasted_iota(jnp.int32, run_XY.shape, axis)
    return MaskInfo(
        data_next=jnp.clip(block, first, last).astype(jnp.int32)[None],
        mask_next=None,
        block_mask=run_XY.astype(jnp.int8)[None],
        partial_mask_blocks=None,
        # Declared as NumPy's, and only ever broadcast.
        q_sequence=cast(Any, reach.last_BT),
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
    """NVIDIA's. Queries are the tokens of whole rows, in the order of the text."""
    from jax.experimental.pallas.ops.gpu import attention as kernel

    B, T, H, D = q_BTHD.shape
    K, E = v_BSKE.shape[2:]
    rows = next(rows for widest, rows in TRITON_ROWS.items() if widest >= D)
    sizes = kernel.BlockSizes(
        block_q=rows,
        block_k=rows,
        block_q_dkv=TRITON_ROWS_BACK,
        block_kv_dkv=TRITON_ROWS_BACK,
        block_q_dq=TRITON_ROWS_BACK,
        block_kv_dq=TRITON_ROWS_BACK,
    )
    # It knows one width.
    v_BSKD = jnp.pad(v_BSKE, ((0, 0), (0, 0), (0, 0), (0, D - E)))

    def of_group(q_BTKD: jax.Array) -> jax.Array:
        return kernel.mha(q_BTKD, k_BSKD, v_BSKD, mask.segments_BT, scale, True, sizes, interpret=interpret)

    # Over the heads that share a KV head, which is not repeated for them.
    out_BTKGD = jax.vmap(of_group, in_axes=3, out_axes=3)(q_BTHD.reshape(B, T, K, H // K, D))
    return out_BTKGD.reshape(B, T, H, D)[..., :E]


def cudnn(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, *, causal: bool = False
) -> jax.Array:
    """NVIDIA's, where cuDNN is installed. ``causal``: queries are the tokens of whole rows, in the order of the text."""
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BSKD,
        v_BSKE,
        mask=mask.visible()[:, None],
        scale=scale,
        is_causal=causal,
        implementation="cudnn",
    )

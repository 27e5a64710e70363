"""Which attention kernel a device uses: a table of kernels, tried in order, and what each needs.

| kernel | where | what it is |
|---|---|---|
| full | everywhere | all scores of a row at once |
| splash | TPU | JAX's Pallas kernel; masked by segments and by the last key that is visible to each query |
| cudnn | NVIDIA, with cuDNN installed | ``jax.nn.dot_product_attention``; takes an attention mask |
| triton | NVIDIA | JAX's Pallas kernel; masked by segments, and by the positions of tokens in their row |
| blockwise | everywhere | plain JAX, a block of queries and of keys at a time; takes any positions and segments |

Only ``full`` holds a score for every pair of tokens: it is used where all keys fit in one block. Otherwise the first kernel
whose needs are met is used, ``blockwise`` last. A plan can therefore
state which kernel an engine will use, and why not a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.resolution.request import Request

Backend = Literal["cpu", "tpu", "gpu", "gpu with cuDNN"]
KernelName = Literal["full", "splash", "cudnn", "triton", "blockwise"]

ACCELERATORS: tuple[Backend, ...] = ("tpu", "gpu", "gpu with cuDNN")

LARGEST_BLOCK: Mapping[Backend, int] = {"cpu": 128, **dict.fromkeys(ACCELERATORS, 512)}
"""Tokens of a block in plain JAX, and the most keys of which all scores are computed at once. On CPU the scores of one head's
block stay in its nearest caches, which is 2 to 3 times as fast as blocks of 512. An accelerator needs larger products, which
take longer than their launch."""

SMALLEST_BLOCK = 128
"""The side of a TPU's matrix unit: smaller blocks are padded to it."""

SCORES_OF_BLOCK = 1 << 23
"""Scores of one block, over all heads of a device: 32 MB in float32, which the cache of a GPU and the vector memory of a TPU
hold. With more heads the blocks are smaller."""

KERNEL_TILE = 128
"""The Pallas kernels take lengths that are multiples of it: the lanes of a TPU, the rows of a block on a GPU."""

LARGEST_MASK_BYTES = 1 << 28
"""cuDNN's mask has two bytes for each pair of tokens, whatever the number of heads: 128 MiB for a row of 8,192."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """The attention of one device: ``rows`` of ``queries`` tokens that attend to ``keys`` tokens each, ``heads`` query heads.

    ``width`` is a query's and a key's, ``value_width`` a value's. ``ring``: the keys arrive shard by shard. ``in_order``:
    the tokens of a row are in the order of the text.
    """

    rows: int
    queries: int
    keys: int
    heads: int
    width: int
    value_width: int
    dtype: str
    ring: bool = False
    in_order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One kernel of the table. ``needs``: names of ``NEEDS``."""

    name: KernelName
    backends: tuple[Backend, ...]
    needs: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """The kernel that is used, tokens of a block where it is plain JAX, and the unmet needs of each faster kernel."""

    name: KernelName
    block: int
    why: str
    lacking: Mapping[KernelName, tuple[str, ...]] = field(default_factory=dict, hash=False)


UNPLANNED = ChosenKernel(name="full", block=0, why="nothing is known of the row")
"""The kernel of a model that runs without a plan."""

NEEDS: Mapping[str, Callable[[LocalAttention], bool]] = {
    "all keys at once (no ring)": lambda a: not a.ring,
    "queries that are all the tokens of a row, in order": lambda a: a.in_order and a.queries == a.keys,
    f"lengths that {KERNEL_TILE} divides": lambda a: not a.queries % KERNEL_TILE and not a.keys % KERNEL_TILE,
    "even lengths": lambda a: not a.queries % 2 and not a.keys % 2,
    "bfloat16 or float32": lambda a: a.dtype in ("bfloat16", "float32"),
    "bfloat16 or float16": lambda a: a.dtype in ("bfloat16", "float16"),
    "one width of at most 128, a multiple of 8": lambda a: a.width == a.value_width <= 128 and not a.width % 8,
    "a width of at most 256, and values no wider": lambda a: a.value_width <= a.width <= 256,
    f"a mask of at most {LARGEST_MASK_BYTES >> 20} MiB": lambda a: (
        a.rows * a.queries * a.keys * DTYPE_BYTES[a.dtype] <= LARGEST_MASK_BYTES
    ),
}

_NO_RING, _OWN_TOKENS, _TILES, _EVEN, _TPU_FLOATS, _HALF, _CUDNN_WIDTH, _TRITON_WIDTH, _MASK = NEEDS

KERNELS = (
    AttentionKernel(
        name="splash",
        backends=("tpu",),
        needs=(_NO_RING, _TILES, _TPU_FLOATS),
        why="scores stay in the chip's vector memory, and fully masked blocks are skipped",
    ),
    AttentionKernel(
        name="cudnn",
        backends=("gpu with cuDNN",),
        needs=(_NO_RING, _HALF, _CUDNN_WIDTH, _EVEN, _MASK),
        why="scores stay in shared memory; the vendor's own kernel, which shares keys between heads",
    ),
    AttentionKernel(
        name="triton",
        backends=("gpu", "gpu with cuDNN"),
        needs=(_NO_RING, _OWN_TOKENS, _TILES, _HALF, _TRITON_WIDTH),
        why="scores stay in shared memory, and keys after a block of queries are skipped",
    ),
)
"""Kernels of particular backends, fastest first. ``choose_attention`` tries ``full`` before them and ``blockwise`` last."""


def choose_attention(backend: Backend, attention: LocalAttention) -> ChosenKernel:
    """The first kernel whose needs are met.

    >>> case = LocalAttention(rows=1, queries=4096, keys=4096, heads=16, width=128, value_width=128, dtype="bfloat16")
    >>> backends = ("cpu", "tpu", "gpu", "gpu with cuDNN")
    >>> [choose_attention(backend, case).name for backend in backends]
    ['blockwise', 'splash', 'triton', 'cudnn']
    >>> from dataclasses import replace
    >>> choose_attention("gpu", replace(case, queries=1024)).lacking
    {'triton': ('queries that are all the tokens of a row, in order',)}
    """
    block = block_of(backend, attention.heads)
    if attention.keys <= LARGEST_BLOCK[backend]:
        return ChosenKernel(name="full", block=block, why=f"all keys ({attention.keys}) fit in one block")
    lacking: dict[KernelName, tuple[str, ...]] = {}
    for kernel in KERNELS:
        if backend not in kernel.backends:
            continue
        missing = tuple(need for need in kernel.needs if not NEEDS[need](attention))
        if not missing:
            return ChosenKernel(name=kernel.name, block=block, why=kernel.why, lacking=lacking)
        lacking[kernel.name] = missing
    return ChosenKernel(name="blockwise", block=block, why="takes any positions and segments", lacking=lacking)


def block_of(backend: Backend, heads: int) -> int:
    """Tokens of a block in plain JAX, the same for queries and keys.

    >>> block_of("cpu", 16), block_of("gpu", 16), block_of("gpu", 128)
    (128, 512, 256)
    """
    size = LARGEST_BLOCK[backend]
    while size > SMALLEST_BLOCK and heads * size * size > SCORES_OF_BLOCK:
        size //= 2
    return size


def local_attention(plan: Plan) -> LocalAttention | None:
    """The attention of one device in one layer; None for a model of whose attention nothing is known."""
    rows, of_model = plan.by_name, plan.request.table.names
    names = (of_model.queries_attended, of_model.keys_attended, of_model.values_attended)
    if not all(name in rows for name in names):
        return None
    queries, keys, values = (rows[name] for name in names)
    local = {
        dim.logical_axis: size // plan.mesh.size(dim.axes)
        for size, dim in zip(queries.shape, queries.in_use.dims, strict=True)
    }
    return LocalAttention(
        rows=local["batch"] // plan.request.microbatches,
        queries=local["q_length"],
        keys=plan.sizes["kv_length"],
        heads=local["heads"],
        width=keys.shape[-1],
        value_width=values.shape[-1],
        dtype=queries.dtype,
        ring=plan.request.layout.move_attention == "ring" and local["q_length"] < plan.sizes["kv_length"],
        in_order=plan.rows_in_order,
    )


def made_again_with_others(request: Request, mesh: Mesh) -> frozenset[str]:
    """What an engine makes again in a layer that makes anything again. The backward pass of attention reads more than its output: all scores
    where they are computed at once, and in a ring the sums after each step. Kernels keep one number for each query and head besides."""
    axes = mesh.larger_than_one(request.layout.axes_sharding("length", "attention"))
    ring = request.layout.move_attention == "ring" and bool(axes)
    if ring and not request.properties.keeps_ring_keys:
        return request.table.names.of_a_ring
    return frozenset({request.table.names.attended} if ring or _scores_at_once(request) else ())


def _scores_at_once(request: Request) -> bool:
    return (
        request.properties.scores_at_once and request.length <= LARGEST_BLOCK["cpu" if request.chip is None else "tpu"]
    )


def sums_of_scores(request: Request, row: TensorPlan) -> int:
    """What a kernel of attention keeps with its output: the logarithm of a float32 sum for each query and head."""
    if row.name != request.table.names.attended or _scores_at_once(request):
        return 0
    return row.bytes_per_device // (DTYPE_BYTES[row.dtype] * row.shape[-1]) * DTYPE_BYTES["float32"]


def mask_bytes(request: Request, mesh: Mesh, rows: Mapping[str, TensorPlan]) -> int:
    """What kernels of attention that read a mask keep besides, once for all layers: which queries attend to which keys, in the computation's dtype."""
    if not request.properties.masks_attention or made_again_with_others(request, mesh):
        return 0
    queries, keys = rows[request.table.names.query_positions], rows[request.table.names.key_positions]
    of_row = ceil(keys.shape[-1] / mesh.size(keys.in_use.dims[-1].axes))
    return queries.bytes_per_device // DTYPE_BYTES[queries.dtype] * of_row * DTYPE_BYTES[request.dtype]

"""The known rewrites of a plan's collectives by compilers: a closed list, and nothing outside it explains a difference.

A rewrite gives its targets, the kinds that it replaces, the kinds that replace them, and the compiled bytes for one
planned byte. Three forms:

| form | ``planned`` | ``compiled`` |
|---|---|---|
| the same collective with other bytes | its kinds | none: the kind stays |
| another kind in its place | its kinds | the other kinds |
| a collective that the plan leaves out | none | its kinds |

A rewrite that ``keeps`` kind, axes and data counts as agreement; any other is an explained difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from shardwright.compiled.agreement import lone_layers
from shardwright.compiled.agreement.widths import is_integer, planned_dtype, width
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.quantization.reductions import AMAX_DTYPE
from shardwright.core.resolution.token_hops import TokenHop, token_hops
from shardwright.cost.hardware.chips import CPU, chips

Range = tuple[float, float]
"""Least and most compiled bytes for one byte that the plan expects."""

AS_PLANNED: Range = (1.0, 1.0)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")

FAMILIES = ("cpu", "tpu", "gpu")
TORCH = "torch"
"""PyTorch executes what the program calls: nothing is rewritten, and only collectives that the plan leaves out have rows."""

PADDED = "padded"
PADDING = 1 / 8
"""The most that libtpu pads a reduce-scatter by, as a share of it: 1,024 rows become 1,152 on v5p."""

TILE_BYTES = 512
"""A row that libtpu sends in a ragged all-to-all is of whole tiles of so many bytes: a scale of 4 bytes takes as many as 128."""

NUMBER_BYTES = 8
"""The most bytes of one number."""

LOSS_SUMS = 3
"""Numbers per token that a loss reduces over a sharded vocabulary: the largest logit, the sum, the target's logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One row of the list; see the top of this file.

    ``targets``: kinds of chip, or families of them (``FAMILIES``). ``rule``: the bytes, in words. ``ratio``: the compiled
    bytes for a planned byte. ``unplanned``: whether a collective is one that the plan leaves out. ``always``: the
    rewrite applies to every collective that it covers.
    """

    name: str
    targets: tuple[str, ...]
    planned: tuple[str, ...]
    compiled: tuple[str, ...]
    rule: str
    reason: str
    ratio: Callable[[Plan, PlannedCollective], Range] | None = None
    unplanned: Callable[[Plan, CompiledCollective], bool] | None = None
    keeps: bool = False
    always: bool = False

    def holds_for(self, target: str) -> bool:
        kind = target.split(":")[0]
        return bool({kind, family(kind)} & set(self.targets))


def family(kind: str) -> str:
    """The kind of compiler that makes programs for a kind of chip.

    >>> family("cpu"), family("v5p"), family("h100"), family("torch")
    ('cpu', 'tpu', 'gpu', 'torch')
    """
    if kind in (CPU, TORCH):
        return kind
    numbers = chips().get(kind)
    return "gpu" if numbers is not None and numbers.network == "switch" else "tpu"


def _wider_on_cpu(plan: Plan, one: PlannedCollective) -> Range:
    dtype = planned_dtype(plan, one)
    return (2.0, 2.0) if dtype in ("bfloat16", "float16") or dtype.startswith("float8") else AS_PLANNED


def _gathered_once(plan: Plan, one: PlannedCollective) -> Range:
    """Weights that no loop over layers slices are the same in all microbatches, and may be gathered once for all; so are their amaxes."""
    microbatches = plan.request.microbatches
    if not _is_of_weights(one) or one.phase == "update":
        return AS_PLANNED
    return 1.0 - lone_layers.of_weights(plan, one) * (microbatches - 1) / microbatches, 1.0


def _read_once(plan: Plan, one: PlannedCollective) -> Range:
    """Integers of the batch that several uses gather are gathered once, and those that nothing reads are not."""
    return (0.0, 1.0) if is_integer(planned_dtype(plan, one)) and one.component != "moe" else AS_PLANNED


def _kept_from_forward(plan: Plan, one: PlannedCollective) -> Range:
    """What the recomputation of a single layer makes of operands that the forward pass has too: of weights, and of what a policy keeps.
    XLA's CPU backend drops the barrier that is between them."""
    if one.phase != "recompute":
        return AS_PLANNED
    keeps = plan.request.remat != "full"
    of_weights = lone_layers.of_weights(plan, one) if _is_of_weights(one) or keeps else 0.0
    return 1.0 - max(of_weights, lone_layers.of_all(plan, one) if keeps else 0.0), 1.0


def _is_of_weights(one: PlannedCollective) -> bool:
    """Whether a row may have gathers of weights, or amaxes of their values."""
    return one.kind == "all-gather" or one.dtype == AMAX_DTYPE


def _full_buffers(plan: Plan, one: PlannedCollective) -> Range:
    """A ragged all-to-all sends as many rows as there are assignments; its buffers have the full capacity."""
    if not one.ragged:
        return AS_PLANNED
    hop = _hop_of(plan, one)
    most = max(hop.rows, hop.buffer_rows) / hop.even_rows
    return most, most


def _in_tiles(plan: Plan, one: PlannedCollective) -> Range:
    """Each row of a ragged all-to-all ends with a tile."""
    if not one.ragged:
        return AS_PLANNED
    row_bytes = one.bytes_per_device / _hop_of(plan, one).even_rows
    by = ceil(row_bytes / TILE_BYTES) * TILE_BYTES / row_bytes
    return by, by


def _chunks(plan: Plan, one: PlannedCollective) -> Range:
    """Without a ragged exchange, each device sends every other the most rows that it could have for it."""
    if not one.ragged:
        return AS_PLANNED
    hop = _hop_of(plan, one)
    most = plan.mesh.size(hop.axes) * hop.chunk / hop.even_rows
    return most, most


def _hop_of(plan: Plan, one: PlannedCollective) -> TokenHop:
    return next(hop for hop in token_hops(plan.request, plan.mesh) if set(hop.axes) == set(one.axes))


def _around_a_ring(plan: Plan, one: PlannedCollective) -> Range:
    """Each shard is permuted around the ring in both directions, with up to two iterations more than other devices."""
    size = plan.mesh.size(one.axes)
    return (size - 1) / size, (size + 1) / size


def _same_bytes(plan: Plan, one: PlannedCollective) -> Range:
    del plan, one
    return AS_PLANNED


def _single_numbers(plan: Plan, one: CompiledCollective) -> bool:
    """The loss, its token count, and the sum of squares of each weight's gradient, as single numbers or one array."""
    nameless = one.component is None and not one.tensors
    return one.bytes_per_device <= NUMBER_BYTES * (len(plan.weights) if nameless else 1)


def _counts(plan: Plan, one: CompiledCollective) -> bool:
    del plan
    return bool(one.dtypes) and all(map(is_integer, one.dtypes))


def _over_a_vocabulary(plan: Plan, one: CompiledCollective) -> bool:
    scores = plan.by_name.get(plan.request.table.names.scores)
    if scores is None:
        return False
    sharding_axes = plan.mesh.in_mesh_order(plan.mesh.larger_than_one(scores.in_use.axes_of("vocab")))
    if one.kind != "all-reduce" or one.axes != sharding_axes or one.component not in ("logits", None):
        return False
    tokens = scores.bytes_per_device // width(scores.dtype) // (scores.shape[-1] // plan.mesh.size(sharding_axes))
    each = tokens // plan.request.microbatches // plan.request.loss_chunks * width("float32")
    return one.bytes_per_device % each == 0 and one.bytes_per_device <= LOSS_SUMS * each


def _repairs(plan: Plan, one: CompiledCollective) -> bool:
    """Permutes that correct a padded reduce-scatter: no more bytes than its padding.

    The name does not matter: a reduce-scatter merged over several components has one of their names.
    """
    scattered = sum(
        planned.bytes_per_device * planned.count_per_step
        for planned in plan.collectives
        if planned.kind == "reduce-scatter" and set(one.axes) <= set(planned.axes)
    )
    return one.stands_for == "reduce-scatter" and one.bytes_per_device * one.count_per_step <= PADDING * scattered


REWRITES: Mapping[str, Rewrite] = {
    rewrite.name: rewrite
    for rewrite in (
        Rewrite(
            name="merged",
            targets=FAMILIES,
            planned=KINDS,
            compiled=(),
            rule="the sum of the merged ones",
            reason="collectives of one kind and axes are merged into one, with the name of one of them, or none",
            keeps=True,
        ),
        Rewrite(
            name="room for all",
            targets=("tpu", "gpu"),
            planned=("all-to-all",),
            compiled=(),
            rule="the capacity of the buffer",
            reason="a program shows the buffer sizes of a ragged all-to-all; the bytes sent depend on the routing",
            ratio=_full_buffers,
            keeps=True,
        ),
        Rewrite(
            name="rows in tiles",
            targets=("tpu",),
            planned=("all-to-all",),
            compiled=(),
            rule=f"rows of a ragged all-to-all up to the next multiple of {TILE_BYTES} bytes",
            reason="libtpu sends rows in tiles: a scale of 4 bytes for each token takes as much as 512 codes",
            ratio=_in_tiles,
        ),
        Rewrite(
            name="wider on CPU",
            targets=("cpu",),
            planned=KINDS,
            compiled=(),
            rule="2 for each byte of a type of 16 or 8 bits",
            reason="XLA's CPU backend sends bfloat16 as float32, and FP8 as float16",
            ratio=_wider_on_cpu,
            always=True,
        ),
        Rewrite(
            name="chunks",
            targets=("cpu",),
            planned=("all-to-all",),
            compiled=(),
            rule="the most that one device could send to another, for each device",
            reason="the CPU backend has no ragged all-to-all, so chunks of the largest size are sent instead",
            ratio=_chunks,
            always=True,
        ),
        Rewrite(
            name="gathered once",
            targets=FAMILIES,
            planned=("all-gather", "all-reduce"),
            compiled=(),
            rule="for weights that no loop over layers slices, one gather, or one reduction of their amaxes, in place of one for each microbatch",
            reason="gathers that are the same in every microbatch are moved out of the loop over microbatches",
            ratio=_gathered_once,
        ),
        Rewrite(
            name="kept from forward",
            targets=("cpu",),
            planned=KINDS,
            compiled=(),
            rule="for a loop over one layer, the gathers of weights of the recomputation or none of them, and the reductions of their amaxes; without --remat full its other collectives too",
            reason="a loop of one iteration is unrolled, and what is made of the same operands for backward is that of forward",
            ratio=_kept_from_forward,
        ),
        Rewrite(
            name="read once",
            targets=FAMILIES,
            planned=("all-gather",),
            compiled=(),
            rule="for integers outside the experts, the bytes that are read, each only once",
            reason="positions and segments that several uses gather are gathered once, and unread ones are not",
            ratio=_read_once,
        ),
        Rewrite(
            name=PADDED,
            targets=("tpu",),
            planned=KINDS,
            compiled=(),
            rule="more by the padding that the program shows",
            reason="libtpu reduces and scatters in one kernel, which pads rows to even sizes and fills tiles",
        ),
        Rewrite(
            name="windowed products",
            targets=("tpu",),
            planned=("all-gather", "reduce-scatter"),
            compiled=("permute",),
            rule="(N - 1)/N to (N + 1)/N over N devices, so up to 9/7 of what a plain gather sends over 8",
            reason="a gather or scatter next to a product becomes a loop that permutes shards while it multiplies",
            ratio=_around_a_ring,
        ),
        Rewrite(
            name="sum of parts",
            targets=("tpu",),
            planned=("all-gather",),
            compiled=("all-reduce",),
            rule="the same",
            reason="each device writes its shard into zeros, and the sum over devices is the gathered tensor",
            ratio=_same_bytes,
        ),
        Rewrite(
            name="all-reduce and slice",
            targets=("cpu", "tpu"),
            planned=("reduce-scatter",),
            compiled=("all-reduce",),
            rule="the same",
            reason="XLA's partitioner makes no reduce-scatter for CPU, and libtpu splits some: everything is summed, and "
            "each device keeps its shard",
            ratio=_same_bytes,
        ),
        Rewrite(
            name="single numbers",
            targets=(*FAMILIES, TORCH),
            planned=(),
            compiled=("all-reduce",),
            rule="one number each, or an array of a number for each weight",
            reason="the plan leaves out the sums of the loss, of its number of tokens, and of the norm of the gradients",
            unplanned=_single_numbers,
        ),
        Rewrite(
            name="counts",
            targets=(*FAMILIES, TORCH),
            planned=(),
            compiled=("all-gather", "all-reduce"),
            rule="integers only",
            reason="the number of assignments of each expert is gathered before tokens are sent, and summed for its bias",
            unplanned=_counts,
        ),
        Rewrite(
            name="counts of rows",
            targets=(TORCH,),
            planned=(),
            compiled=("all-to-all",),
            rule="integers only",
            reason="each rank sends every other the number of rows for each of its experts",
            unplanned=_counts,
        ),
        Rewrite(
            name="sums over the vocabulary",
            targets=(*FAMILIES, TORCH),
            planned=(),
            compiled=("all-reduce",),
            rule="at most three numbers per token",
            reason="the loss over a sharded vocabulary needs the largest logit, the sum and the target's from all shards",
            unplanned=_over_a_vocabulary,
        ),
        Rewrite(
            name="repairs",
            targets=("tpu",),
            planned=(),
            compiled=("permute",),
            rule="up to 1/8 of the reduce-scatters over the same axes",
            reason="permutes move the rows of a padded reduce-scatter to the devices that own them",
            unplanned=_repairs,
        ),
    )
}
"""Every rewrite by its name, in the order in which they are tried."""


def axes_in_order(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes as they are compared: in mesh order, without those of size 1."""
    return mesh.larger_than_one(mesh.in_mesh_order(axes))

"""Bytes on one device: exact for what is stored between steps, an estimate for what a step needs in addition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.optimizer import AVERAGE, Kept
from shardwright.core.model.precision import PRECISION, dtype_of
from shardwright.core.model.table import DTYPE_BYTES, Move
from shardwright.core.plan.movement import reshard_steps
from shardwright.core.plan.plan import Memory, TensorPlan, layers_on_device
from shardwright.core.plan.resharding import weight_update
from shardwright.core.resolution.request import Request


def bytes_on_device(spec: Spec, shape: Sequence[int], dtype: str, mesh: Mesh) -> int:
    """Bytes of the largest shard on one device. A dim that its axes do not divide is rounded up.

    A leading ``layers`` dim that is not in ``shape`` is ignored: the bytes are those of one layer.
    """
    dims = spec.dims[len(spec.dims) - len(shape) :]
    elements = 1
    for size, dim in zip(shape, dims, strict=True):
        elements *= ceil(size / mesh.size(dim.axes))
    return elements * DTYPE_BYTES[dtype]


def estimate_memory(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> Memory:
    """Memory of one device at the peak of a step.

    Gradients are stored as ``held_gradient`` says; what the optimizer keeps, and the average, as the update of
    their weights is sharded. ``activations_bytes`` is what the largest of three points
    in time needs in addition to weights, their gradients, the optimizer's tensors and the average:

    | point in time | holds |
    |---|---|
    | the logits' backward pass | what layers save; the logits in float32, their cotangent in the dtype of the computation, and a transposed copy of it for the weight's gradient (not on TPU); the logits' weight in use, and its unsharded gradient. No gradient of a layer exists yet |
    | the backward pass of a layer | what layers save; all gradients; for the stack whose layer needs the most, one layer's named activations with their cotangents, its gathered weights, their unsharded gradients, and float32 accumulators for those of experts (not on TPU) |
    | the gathers of updated weights, on JAX | gradients as in the update, and all weights whose update is sharded, gathered before they take the place of the old ones |

    TPU compilers hold only the gradients of a layer that are in use: the cotangents of one component, the largest, and the
    unsharded gradient of one weight, the largest. Others are reduce-scattered before.

    With microbatches the accumulated gradients are held during the entire step; replicas are all-reduced in place. Layers
    save what ``remat`` says: the residual stream; with ``dots`` every named activation except the dispatched tokens; with
    ``none`` all. Queries and keys that are not moved for attention count once. docs/compiled.md compares the estimate
    with what compilers need.
    """
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    weights = [tensor for tensor in tensors if tensor.kind == "weight"]
    rows = {tensor.name: tensor for tensor in tensors}
    same = {move.target for move in request.table.moves if _moves_nothing(move, rows, mesh)}
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    stored = sum(t.bytes_per_device * layers_on_device(request, mesh, t) for t in weights)
    trained = [t for t in weights if t.name not in frozen]
    updates = {t.name: weight_update(request, mesh, t) for t in trained}
    held = sum(_elements(request, mesh, t, updates[t.name].held) for t in trained)
    elements = {t.name: _elements(request, mesh, t, updates[t.name].in_update) for t in trained}
    gradients = held * DTYPE_BYTES[request.summed_in]
    peaks = (
        _at_the_logits(request, mesh, trained, activations),
        gradients + _in_a_layer(request, mesh, trained, activations),
    )
    accumulated = gradients if request.microbatches > 1 else 0
    reduced = sum(elements.values()) * DTYPE_BYTES[request.summed_in]
    at_the_update = reduced + _gathered_at_the_update(request, mesh, trained)
    return Memory(
        weights_bytes=stored,
        gradients_bytes=gradients,
        optimizer_bytes=sum(_kept_bytes(kept, elements) for kept in request.kept if kept.prefix != AVERAGE.prefix),
        activations_bytes=max(0, max(peaks) + accumulated - gradients, at_the_update - gradients),
        average_bytes=sum(_kept_bytes(kept, elements) for kept in request.kept if kept.prefix == AVERAGE.prefix),
    )


def _elements(request: Request, mesh: Mesh, tensor: TensorPlan, spec: Spec) -> int:
    """Elements of all layers of a weight on one device, under a spec."""
    of_layer = bytes_on_device(spec, tensor.shape, tensor.dtype, mesh) // DTYPE_BYTES[tensor.dtype]
    return of_layer * layers_on_device(request, mesh, tensor)


def microbatch_bytes(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> tuple[int, int]:
    """What a stage's microbatch holds between its forward and its backward pass, and what one of these passes needs besides.

    The points in time of ``estimate_memory``. In a pipeline gradients have been summed already at each of them.
    """
    rows = {tensor.name: tensor for tensor in tensors}
    same = {move.target for move in request.table.moves if _moves_nothing(move, rows, mesh)}
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    trained = [tensor for tensor in tensors if tensor.kind == "weight" and tensor.name not in frozen]
    saved = _saved(request, mesh, activations)
    peaks = (
        _at_the_logits(request, mesh, trained, activations, in_a_branch=request.engine == "jax"),
        _in_a_layer(request, mesh, trained, activations),
    )
    return saved, max(peaks) - saved


def _kept_bytes(kept: Kept, elements: Mapping[str, int]) -> int:
    assert kept.dtype is not None
    return sum(number for name, number in elements.items() if kept.has(name)) * DTYPE_BYTES[kept.dtype]


def _moves_nothing(move: Move, rows: Mapping[str, TensorPlan], mesh: Mesh) -> bool:
    """Whether queries or keys are the same array before and after a move. Other moves do more than reshard."""
    if move.kind not in ("queries", "keys") or not {move.source, move.target} <= set(rows):
        return False
    before, after = rows[move.source].in_use.renamed(move.renamed or {}), rows[move.target].in_use
    return not reshard_steps(before, after, (), mesh)


def _at_the_logits(
    request: Request,
    mesh: Mesh,
    trained: Sequence[TensorPlan],
    activations: Sequence[TensorPlan],
    *,
    in_a_branch: bool = False,
) -> int:
    """``in_a_branch``: the loss is one, as in a pipeline on JAX. Compilers order so small a part so that there is one copy less of the
    cotangent, and none of the weight beside its gradient (both measured on llama3-8b, for H100 and v5p)."""
    cotangent = dtype_of(PRECISION["cotangent"].kept, computation=request.dtype)
    copies = DTYPE_BYTES[cotangent] * ((1 if _no_transposed_copies(request) else 2) - in_a_branch)
    logits = sum(
        a.bytes_per_device // DTYPE_BYTES[a.dtype] * (DTYPE_BYTES[a.dtype] + copies)
        for a in activations
        if a.component == "logits" and "vocab" in a.in_use.logical_axes
    )
    kernels = [w for w in trained if w.component == "logits" or "logits" in request.table.weight(w.name).uses]
    times = 1 if in_a_branch else 2
    gathered = sum(times * bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in kernels)
    return _saved(request, mesh, activations) + ceil(logits / request.microbatches) + gathered


def _in_a_layer(request: Request, mesh: Mesh, trained: Sequence[TensorPlan], activations: Sequence[TensorPlan]) -> int:
    """The need of the stack whose layer needs the most: no two layers are computed at the same time."""
    stacks: dict[str, list[TensorPlan]] = {}
    for w in trained:
        if w.stack is not None:
            stacks.setdefault(w.stack, []).append(w)
    stacks_of = {a.name: a.stacks for a in request.table.activations}
    inside = [a for a in activations if a.component not in OUTSIDE_LAYERS]
    most = 0
    for stack, weights in stacks.items():
        own = [a for a in inside if not stacks_of[a.name] or stack in stacks_of[a.name]]
        working = ceil(_working_set(request, own) / request.microbatches)
        most = max(most, working + _weights_in_use(request, mesh, weights))
    return _saved(request, mesh, activations) + most


def _working_set(request: Request, activations: Sequence[TensorPlan]) -> int:
    """Activations of one layer with their cotangents."""
    components: dict[str, int] = {}
    for a in activations:
        components[a.component] = components.get(a.component, 0) + a.bytes_per_device
    forward = sum(components.values())
    return forward + (max(components.values(), default=0) if _no_transposed_copies(request) else forward)


def _weights_in_use(request: Request, mesh: Mesh, weights: Sequence[TensorPlan]) -> int:
    """One layer's weights in use, and the unsharded gradients of those that are gathered."""
    in_use = {w.name: bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in weights}
    gradients = [in_use[w.name] for w in weights if w.at_rest != w.in_use or _scatters(request, mesh, w)]
    if _no_transposed_copies(request):
        return sum(in_use.values()) + max(gradients, default=0)
    accumulators = (bytes_on_device(w.in_use, w.shape, "float32", mesh) for w in weights if w.component == "moe")
    return sum(in_use.values()) + sum(gradients) + sum(accumulators)


def _gathered_at_the_update(request: Request, mesh: Mesh, trained: Sequence[TensorPlan]) -> int:
    """What XLA gathers of weights of which each device has updated a part; PyTorch gathers one layer at a time, into the weights."""
    if request.engine == "torch":
        return 0
    return sum(t.bytes_per_device * layers_on_device(request, mesh, t) for t in trained if t.update_is_sharded)


def _scatters(request: Request, mesh: Mesh, tensor: TensorPlan) -> bool:
    """Whether a weight's gradient is sharded in each microbatch in another way than the weight."""
    update = weight_update(request, mesh, tensor)
    return update.held != update.at_rest


def _no_transposed_copies(request: Request) -> bool:
    """Whether the chip is a TPU. Its products read a matrix along either dim, and its kernel accumulates experts' gradients
    in its own memory. Other chips hold transposed copies and accumulators in addition."""
    return request.chip is not None and request.chip.accelerator == "TPU"


def _saved(request: Request, mesh: Mesh, activations: Sequence[TensorPlan]) -> int:
    """What the forward pass of all layers saves for the backward pass of one microbatch."""
    saves = {
        "full": lambda a: a.component == "residual" and a.name.endswith("stream"),
        "dots": lambda a: not {"slots", "tokens"} & set(a.in_use.logical_axes),
        "none": lambda _: True,
    }[request.remat]
    found = [a for a in activations if a.component not in OUTSIDE_LAYERS and saves(a)]
    saved = sum(a.bytes_per_device * layers_on_device(request, mesh, a) for a in found)
    return ceil(saved / request.microbatches)

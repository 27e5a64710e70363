"""Bytes on one device: exact for what rests there, an estimate for what a step needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import PRECISION, dtype_of
from shardwright.core.model.table import DTYPE_BYTES, Move
from shardwright.core.plan.movement import steps
from shardwright.core.plan.plan import Memory, TensorPlan, layers_on_device
from shardwright.core.resolution.request import Request


def bytes_on_device(spec: Spec, shape: Sequence[int], dtype: str, mesh: Mesh) -> int:
    """Bytes of the largest part that one device holds; a dim that its axes do not divide is rounded up.

    A leading ``layers`` dim that is not in ``shape`` is passed over: bytes are those of one layer.
    """
    dims = spec.dims[len(spec.dims) - len(shape) :]
    elements = 1
    for size, dim in zip(shape, dims, strict=True):
        elements *= ceil(size / mesh.size(dim.axes))
    return elements * DTYPE_BYTES[dtype]


def estimate_memory(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> Memory:
    """Memory of one device at the peak of a step.

    Gradients rest as their weights do, in the weights' dtype. Activations are what the larger of two moments holds
    beside weights, their gradients and the optimizer's moments:

    | moment | holds |
    |---|---|
    | the logits' backward pass | what layers keep; the scores in float32, their slope in the dtype of the computation, and that a second time, turned for the weight's gradient (not on TPU); the logits' weight in use, and its whole gradient. No gradient of a layer is there yet |
    | the backward pass of a layer | what layers keep; all gradients; of the stack whose layer needs the most, one layer's named activations with theirs, its gathered weights, their whole gradients, and those of experts once more in float32, in which they are added up (not on TPU) |

    TPU compilers keep of a layer's gradients only what is at work: the activations' of one component, the largest, and
    the whole gradient of one weight, the largest; others are summed and scattered before.

    With microbatches the sums of their gradients are held all along; what replicas sum is summed in place. What layers
    keep is ``remat``'s: the residual stream; with ``dots`` every named activation but the dispatched tokens; with
    ``none`` all. Queries and keys that are attended where they were made count once. docs/compiled.md has the estimate
    beside what compilers need.
    """
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    weights = [tensor for tensor in tensors if tensor.kind == "weight"]
    rows = {tensor.name: tensor for tensor in tensors}
    same = {move.target for move in request.table.moves if _moves_nothing(move, rows, mesh)}
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    resting = sum(t.bytes_per_device * layers_on_device(request, mesh, t) for t in weights)
    trained = [t for t in weights if t.name not in frozen]
    elements = sum(t.bytes_per_device // DTYPE_BYTES[t.dtype] * layers_on_device(request, mesh, t) for t in trained)
    gradients = elements * DTYPE_BYTES[request.weights_dtype]
    moments = (
        _at_the_logits(request, mesh, trained, activations),
        gradients + _in_a_layer(request, mesh, trained, activations),
    )
    sums = gradients if request.microbatches > 1 else 0
    return Memory(
        weights_bytes=resting,
        gradients_bytes=gradients,
        optimizer_bytes=2 * elements * DTYPE_BYTES[request.moments_dtype],
        activations_bytes=max(0, max(moments) + sums - gradients),
    )


def _moves_nothing(move: Move, rows: Mapping[str, TensorPlan], mesh: Mesh) -> bool:
    """Whether queries or keys are one array before and after a move; other moves stand for more than a change of place."""
    if move.kind not in ("queries", "keys") or not {move.source, move.target} <= set(rows):
        return False
    before, after = rows[move.source].in_use.renamed(move.renamed or {}), rows[move.target].in_use
    return not steps(before, after, (), mesh)


def _at_the_logits(
    request: Request, mesh: Mesh, trained: Sequence[TensorPlan], activations: Sequence[TensorPlan]
) -> int:
    slope = dtype_of(PRECISION["cotangent"].kept, computation=request.dtype)
    slopes = DTYPE_BYTES[slope] * (1 if _turns(request) else 2)
    scores = sum(
        a.bytes_per_device // DTYPE_BYTES[a.dtype] * (DTYPE_BYTES[a.dtype] + slopes)
        for a in activations
        if a.component == "logits" and "vocab" in a.in_use.logical_axes
    )
    kernels = [w for w in trained if w.component == "logits" or "logits" in request.table.weight(w.name).uses]
    gathered = sum(2 * bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in kernels)
    return _kept(request, mesh, activations) + ceil(scores / request.microbatches) + gathered


def _in_a_layer(request: Request, mesh: Mesh, trained: Sequence[TensorPlan], activations: Sequence[TensorPlan]) -> int:
    """Of a layer of each stack alone: no two layers are computed at one time."""
    stacks: dict[str, list[TensorPlan]] = {}
    for w in trained:
        if w.stack is not None:
            stacks.setdefault(w.stack, []).append(w)
    having = {a.name: a.stacks for a in request.table.activations}
    inside = [a for a in activations if a.component not in OUTSIDE_LAYERS]
    most = 0
    for stack, weights in stacks.items():
        own = [a for a in inside if not having[a.name] or stack in having[a.name]]
        working = ceil(_worked_on(request, own) / request.microbatches)
        most = max(most, working + _weights_in_use(request, mesh, weights))
    return _kept(request, mesh, activations) + most


def _worked_on(request: Request, activations: Sequence[TensorPlan]) -> int:
    """Activations of one layer with their gradients."""
    components: dict[str, int] = {}
    for a in activations:
        components[a.component] = components.get(a.component, 0) + a.bytes_per_device
    forward = sum(components.values())
    return forward + (max(components.values(), default=0) if _turns(request) else forward)


def _weights_in_use(request: Request, mesh: Mesh, weights: Sequence[TensorPlan]) -> int:
    """One layer's weights as they are used, gathered ones with their whole gradients."""
    whole = {w.name: bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in weights}
    gradients = [whole[w.name] for w in weights if w.at_rest != w.in_use]
    if _turns(request):
        return sum(whole.values()) + max(gradients, default=0)
    added_up = (bytes_on_device(w.in_use, w.shape, "float32", mesh) for w in weights if w.component == "moe")
    return sum(whole.values()) + sum(gradients) + sum(added_up)


def _turns(request: Request) -> bool:
    """A TPU's products read a matrix along either dim, and a kernel adds experts' gradients up in memory of its own;
    others hold what is turned, and the sums, beside it."""
    return request.chip is not None and request.chip.accelerator == "TPU"


def _kept(request: Request, mesh: Mesh, activations: Sequence[TensorPlan]) -> int:
    """What the forward pass of all layers leaves for the backward pass, of one microbatch."""
    kept = {
        "full": lambda a: a.component == "residual" and a.name.endswith("stream"),
        "dots": lambda a: not {"slots", "tokens"} & set(a.in_use.logical_axes),
        "none": lambda _: True,
    }[request.remat]
    found = [a for a in activations if a.component not in OUTSIDE_LAYERS and kept(a)]
    saved = sum(a.bytes_per_device * layers_on_device(request, mesh, a) for a in found)
    return ceil(saved / request.microbatches)

"""Bytes on one device: exact for what rests there, an estimate for what a step needs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from shardwright.core.mesh import Mesh
from shardwright.core.movement import steps
from shardwright.core.plan import Memory, TensorPlan
from shardwright.core.request import Request
from shardwright.core.roles import OUTSIDE_LAYERS
from shardwright.core.spec import Spec
from shardwright.core.table import DTYPE_BYTES, Move


def bytes_on_device(spec: Spec, shape: Sequence[int], dtype: str, mesh: Mesh) -> int:
    """Bytes of the largest part that one device holds; a dim that its axes do not divide is rounded up.

    A leading ``layers`` dim that is not in ``shape`` is passed over: bytes are those of one layer.
    """
    dims = spec.dims[len(spec.dims) - len(shape) :]
    elements = 1
    for size, dim in zip(shape, dims, strict=True):
        elements *= ceil(size / mesh.size(dim.axes))
    return elements * DTYPE_BYTES[dtype]


def layers_on_device(tensor: TensorPlan, mesh: Mesh) -> int:
    """How many of the layers that share a row one device holds: all, unless pipeline stages cut the stack."""
    spec = tensor.rests
    stages = mesh.size(spec.dims[0].axes) if len(spec.dims) > len(tensor.shape) else 1
    return ceil(tensor.num / stages)


def estimate_memory(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> Memory:
    """Memory of one device at the peak of a step.

    Gradients rest as their weights do, in the weights' dtype. Activations, of one micro-step: what ``remat`` keeps of each layer
    (the residual stream; with ``dots`` every named activation but the dispatched tokens; with ``none`` all),
    plus one layer's named activations with their gradients, plus one layer's gathered weights, plus the logits
    and their gradient in float32. Queries and keys that are attended where they were made count once.
    """
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    weights = [tensor for tensor in tensors if tensor.kind == "weight"]
    rows = {tensor.name: tensor for tensor in tensors}
    same = {move.target for move in request.table.moves if _moves_nothing(move, rows, mesh)}
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    resting = sum(t.bytes_per_device * layers_on_device(t, mesh) for t in weights)
    trained_elements = sum(
        t.bytes_per_device // DTYPE_BYTES[t.dtype] * layers_on_device(t, mesh) for t in weights if t.name not in frozen
    )
    return Memory(
        weights_bytes=resting,
        gradients_bytes=trained_elements * DTYPE_BYTES[request.weights_dtype],
        optimizer_bytes=2 * trained_elements * DTYPE_BYTES[request.moments_dtype],
        activations_bytes=_activations(request, mesh, weights, activations),
    )


def _moves_nothing(move: Move, rows: Mapping[str, TensorPlan], mesh: Mesh) -> bool:
    """Whether queries or keys are one array before and after a move; other moves stand for more than a change of place."""
    if move.kind not in ("queries", "keys") or not {move.source, move.target} <= set(rows):
        return False
    before, after = rows[move.source].in_use.renamed(move.renamed or {}), rows[move.target].in_use
    return not steps(before, after, (), mesh)


def _activations(request: Request, mesh: Mesh, weights: list[TensorPlan], activations: list[TensorPlan]) -> int:
    in_layers = [a for a in activations if a.component not in OUTSIDE_LAYERS]
    outside = [a for a in activations if a.component in OUTSIDE_LAYERS]
    kept = {
        "full": lambda a: a.component == "residual" and a.name.endswith("stream"),
        "dots": lambda a: not {"slots", "tokens"} & set(a.in_use.logical_axes),
        "none": lambda _: True,
    }[request.remat]
    stages = {a.component: mesh.size(request.layout.axes_with("stage", a.component)) for a in in_layers}
    saved = sum(a.bytes_per_device * ceil(a.num / stages[a.component]) for a in in_layers if kept(a))
    working = 2 * sum(a.bytes_per_device for a in in_layers)
    logits = sum(
        2 * a.bytes_per_device * DTYPE_BYTES["float32"] // DTYPE_BYTES[a.dtype]
        for a in outside
        if a.component == "logits"
    )
    gathered = sum(
        bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in weights if w.at_rest != w.in_use and w.stack
    )
    return ceil((saved + working + logits) / request.micro_steps) + gathered

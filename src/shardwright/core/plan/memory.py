"""Bytes on one device: exact for what is stored between steps, an estimate for what a step needs in addition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import ceil
from typing import Literal

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.optimizer import AVERAGE, Kept
from shardwright.core.model.precision import PRECISION, dtype_of
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.attention_kernels import made_again_with_others, mask_bytes, sums_of_scores
from shardwright.core.plan.plan import Memory, TensorPlan, layers_on_device
from shardwright.core.plan.resharding import WeightUpdate, same_arrays, weight_reshardings, weight_update
from shardwright.core.policies.runs import Run, keep_a_mask, runs_of
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import expert_axes


@lru_cache(maxsize=8192)
def bytes_on_device(spec: Spec, shape: tuple[int, ...], dtype: str, mesh: Mesh) -> int:
    """Bytes of the largest shard on one device. A dim that its axes do not divide is rounded up.

    A leading ``layers`` dim that is not in ``shape`` is ignored: the bytes are those of one layer.
    """
    dims = spec.dims[len(spec.dims) - len(shape) :]
    elements = 1
    for size, dim in zip(shape, dims, strict=True):
        elements *= ceil(size / mesh.size(dim.axes)) if dim.axes else size
    return elements * DTYPE_BYTES[dtype]


def estimate_memory(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> Memory:
    """Memory of one device at the peak of a step.

    Gradients are stored as ``held_gradient`` says; what the optimizer keeps, and the average, as the update of their weights is sharded.
    ``activations_bytes`` is what the largest of these moments needs besides weights, gradients, the optimizer's tensors and the average:

    | moment, of buffers that a compiler plans | holds |
    |---|---|
    | the logits' backward pass | what layers save; the logits in float32, their cotangent in the dtype of the computation, all of one chunk of the tokens; the logits' weight in use, the projection's input and its cotangent. With several chunks the weight's gradient too |
    | the backward pass of a layer | what layers save; all gradients but the embedding's; for the stack whose layer needs the most, one layer's named activations with their cotangents, its gathered weights, their unsharded gradients, and float32 accumulators for those of experts (not on TPU) |
    | the embedding's backward pass | all gradients but the embedding's; that one in float32, and rounded |
    | the gathers of updated weights | gradients as in the update, and all weights whose update is sharded, gathered before they take the place of the old ones |

    TPU compilers hold only the gradients of a layer that are in use: the cotangents of one component, the largest, and the unsharded gradient
    of one weight, the largest. Weights that stay gathered are held at the first two moments, accumulated gradients during the entire step.
    docs/memory-torch.md has those of ``frees_eagerly``. Layers save what the policy of recomputation keeps and their backward pass reads. Queries
    and keys that are not moved for attention count once. docs/compiled.md compares the estimate with what compilers need.
    """
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    weights = [tensor for tensor in tensors if tensor.kind == "weight"]
    rows = {tensor.name: tensor for tensor in tensors}
    same = same_arrays(request, rows, mesh)
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    stored = sum(t.bytes_per_device * layers_on_device(request, mesh, t) for t in weights)
    trained = [t for t in weights if t.name not in frozen]
    updates = {t.name: weight_update(request, mesh, t) for t in trained}
    elements = {t.name: _elements(request, mesh, t, updates[t.name].in_update) for t in trained}
    gradients = _summed_bytes(request, mesh, trained, updates)
    runs = kept_runs(request, mesh, tensors)
    saved = saved_by_layers(request, mesh, tensors, runs) + _kept_weights(request, mesh, trained, runs)
    if request.properties.frees_eagerly:
        moments = _freed_eagerly(request, mesh, trained, activations, updates)
        peaks = [saved * is_saved + needed for is_saved, needed in moments]
    else:
        # That of the embedding is the last one, unless the logits have begun it.
        last = [w for w in trained if w.component == "embedding" and not request.table.weight(w.name).uses]
        before_it = gradients - _summed_bytes(request, mesh, last, updates)
        saved += (cast := _cast_ahead(request, mesh, weights))
        peaks = [
            saved + _at_the_logits(request, mesh, trained, activations),
            saved + before_it + _in_a_layer(request, mesh, trained, activations),
            before_it + cast + _at_the_embedding(request, mesh, trained),
        ]
    accumulated = gradients if request.microbatches > 1 else 0
    reduced = sum(elements.values()) * DTYPE_BYTES[request.summed_in]
    at_the_update = reduced + _gathered_at_the_update(request, mesh, trained)
    return Memory(
        weights_bytes=stored,
        gradients_bytes=gradients,
        optimizer_bytes=sum(_kept_bytes(kept, elements) for kept in request.kept if kept.prefix != AVERAGE.prefix),
        activations_bytes=max(0, max(peaks) + accumulated - gradients, at_the_update - gradients),
        average_bytes=sum(_kept_bytes(kept, elements) for kept in request.kept if kept.prefix == AVERAGE.prefix),
        host_bytes=saved_by_layers(request, mesh, tensors, runs, "hosted"),
    )


def narrowed_bytes(
    request: Request, mesh: Mesh, tensors: Sequence[TensorPlan], quantized: Sequence[QuantizedWeight]
) -> int:
    """How much less a device has of weights that rest as codes than a checkpoint has of them."""
    resting = {one.name for one in quantized if one.rests}
    return sum(
        (bytes_on_device(t.at_rest, t.shape, t.dtype, mesh) - t.bytes_per_device) * layers_on_device(request, mesh, t)
        for t in tensors
        if t.name in resting and t.at_rest is not None
    )


def _summed_bytes(
    request: Request, mesh: Mesh, weights: Iterable[TensorPlan], updates: Mapping[str, WeightUpdate]
) -> int:
    """The gradients of weights, as they are summed over microbatches."""
    held = sum(_elements(request, mesh, w, updates[w.name].held) for w in weights)
    return held * DTYPE_BYTES[request.summed_in]


def _elements(request: Request, mesh: Mesh, tensor: TensorPlan, spec: Spec) -> int:
    """Elements of all layers of a weight on one device, under a spec."""
    of_layer = bytes_on_device(spec, tensor.shape, tensor.dtype, mesh) // DTYPE_BYTES[tensor.dtype]
    return of_layer * layers_on_device(request, mesh, tensor)


def microbatch_bytes(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> tuple[int, int]:
    """What a stage's microbatch holds between its forward and its backward pass, and what one of these passes needs besides.

    The points in time of ``estimate_memory``. In a pipeline gradients have been summed already at each of them.
    """
    rows = {tensor.name: tensor for tensor in tensors}
    same = same_arrays(request, rows, mesh)
    activations = [tensor for tensor in tensors if tensor.kind == "activation" and tensor.name not in same]
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    trained = [tensor for tensor in tensors if tensor.kind == "weight" and tensor.name not in frozen]
    peaks = (
        _at_the_logits(request, mesh, trained, activations, in_a_branch=request.properties.one_program),
        _in_a_layer(request, mesh, trained, activations, in_a_branch=request.properties.one_program),
    )
    return saved_by_layers(request, mesh, tensors, kept_runs(request, mesh, tensors)), max(peaks)


def _kept_bytes(kept: Kept, elements: Mapping[str, int]) -> int:
    assert kept.dtype is not None
    return sum(number for name, number in elements.items() if kept.has(name)) * DTYPE_BYTES[kept.dtype]


def _at_the_logits(
    request: Request,
    mesh: Mesh,
    trained: Sequence[TensorPlan],
    activations: Sequence[TensorPlan],
    *,
    in_a_branch: bool = False,
) -> int:
    """``in_a_branch``: the loss is one, as in a pipeline of one program. XLA for TPUs then makes the cotangent of the logits inside of the products
    that read it, and so it does for a tied weight where a device has several rows."""
    cotangent = DTYPE_BYTES[dtype_of(PRECISION["cotangent"].kept, computation=request.dtype)]
    scores = [a for a in activations if a.component == "logits" and "vocab" in a.in_use.logical_axes]
    kernels = [w for w in trained if w.component == "logits" or "logits" in request.table.weight(w.name).uses]
    tied = any(request.table.weight(w.name).uses for w in kernels)
    rows = max((ceil(a.shape[0] / mesh.size(a.in_use.dims[0].axes)) for a in scores), default=0)
    inside = _on_tpu(request) and (in_a_branch or (tied and rows > request.microbatches))
    # A rank in stages has a transposed copy of the cotangent, and the weight beside its gradient.
    times = 2 if request.properties.frees_eagerly else 1
    copies = 0 if inside else times * cotangent
    logits = sum(_elements_of(a) * (DTYPE_BYTES[a.dtype] + copies) for a in scores)
    if request.loss_chunks > 1:
        in_chunks = ceil(logits / request.microbatches / request.loss_chunks)
        return _beside_a_chunk(request, mesh, kernels, activations, in_chunks)
    in_use = times * sum(bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in kernels)
    # A branch has them as its operand and its result.
    has_inputs = not in_a_branch and not request.properties.frees_eagerly
    inputs = 2 * _bytes_of(activations, request.table.names.logits_input) * has_inputs
    return ceil((logits + inputs) / request.microbatches) + in_use


def _cast_ahead(request: Request, mesh: Mesh, weights: Sequence[TensorPlan]) -> int:
    """The layers' weights at rest in the dtype that is gathered, where that is another one. XLA for TPUs takes the cast out of the loop over
    layers, also through a barrier, so that the copies of all layers are there from the first layer to the last gradient."""
    if not _on_tpu(request):
        return 0
    cast = 0
    for w in weights:
        if w.stack is not None and w.at_rest is not None:
            sent = weight_reshardings(request, mesh, w)[w.component].gather_dtype
            of_layer = bytes_on_device(w.at_rest, w.shape, sent, mesh) if sent != w.dtype else 0
            cast += of_layer * layers_on_device(request, mesh, w)
    return cast


def _at_the_embedding(request: Request, mesh: Mesh, trained: Sequence[TensorPlan]) -> int:
    """The embedding's gradient of a microbatch, summed in float32, and rounded."""
    dtypes = dict.fromkeys(("float32", request.dtype))
    ends = [w for w in trained if w.component == "embedding"]
    return sum(bytes_on_device(w.in_use, w.shape, dtype, mesh) for w in ends for dtype in dtypes)


def _beside_a_chunk(
    request: Request, mesh: Mesh, kernels: Sequence[TensorPlan], activations: Sequence[TensorPlan], logits: int
) -> int:
    """The logits of one chunk, ``logits`` bytes, with what all chunks share: the weight in use, its gradient in float32, and the
    projection's input with its cotangent. After the last chunk the gradient is rounded, beside which there are no logits."""
    in_use, wide = (
        sum(bytes_on_device(w.in_use, w.shape, dtype, mesh) for w in kernels) for dtype in (request.dtype, "float32")
    )
    inputs = _bytes_of(activations, request.table.names.logits_input)
    return in_use + wide + 2 * ceil(inputs / request.microbatches) + max(logits, in_use * (request.dtype != "float32"))


def _in_a_layer(
    request: Request,
    mesh: Mesh,
    trained: Sequence[TensorPlan],
    activations: Sequence[TensorPlan],
    *,
    in_a_branch: bool = False,
    eager: bool = False,
) -> int:
    """The need of the stack whose layer needs the most: no two layers are computed at the same time. ``in_a_branch``: the layer is one,
    as in a pipeline of one program. ``eager``: as autograd frees, what a component saved goes when its backward pass is through."""
    stacks: dict[str, list[TensorPlan]] = {}
    for w in trained:
        if w.stack is not None:
            stacks.setdefault(w.stack, []).append(w)
    stacks_of = {a.name: a.stacks for a in request.table.activations}
    inside = [a for a in activations if a.component not in OUTSIDE_LAYERS]
    most = 0
    for stack, weights in stacks.items():
        own = [a for a in inside if not stacks_of[a.name] or stack in stacks_of[a.name]]
        working = ceil(_working_set(request, own, eager) / request.microbatches)
        most = max(most, working + _weights_in_use(request, mesh, weights, in_a_branch=in_a_branch, eager=eager))
    return most


def _freed_eagerly(
    request: Request,
    mesh: Mesh,
    trained: Sequence[TensorPlan],
    activations: Sequence[TensorPlan],
    updates: Mapping[str, WeightUpdate],
) -> Iterator[tuple[bool, int]]:
    """The points in time at which a rank may need the most where arrays go when autograd has no more use for them, each with whether all
    that layers save is there, and what there is besides. docs/memory-torch.md has them as a table."""
    layers, ends = ([w for w in trained if (w.stack is None) == outside] for outside in (False, True))
    dtypes = (request.dtype, request.summed_in)
    in_use, summed = ({w.name: bytes_on_device(w.in_use, w.shape, dtype, mesh) for w in trained} for dtype in dtypes)
    tied = {w.name for w in ends if request.table.weight(w.name).uses}
    made = [w for w in ends if _is_gathered(mesh, w) or w.dtype != request.dtype]
    held = sum(in_use[w.name] for w in made)
    # A tied weight's gradients are summed in another dtype than it is gathered in, one use after the other.
    before = sum(
        summed[w.name] if w.name in tied else in_use[w.name]
        for w in made
        if w.component != "embedding" or w.name in tied
    )
    shards = [w for w in layers if _is_gathered(mesh, w)]
    stacks = {w.stack for w in shards}
    gathered = max((sum(in_use[w.name] for w in shards if w.stack == stack) for stack in stacks), default=0)
    # With microbatches all gradients are there anyhow.
    of_layers = 0 if request.microbatches > 1 else _summed_bytes(request, mesh, layers, updates)
    scores = sum(_elements_of(a) for a in activations if a.component == "logits" and "vocab" in a.in_use.logical_axes)
    inputs = ceil(2 * _bytes_of(activations, request.table.names.logits_input) / request.microbatches)
    kernels = [w for w in ends if w.component == "logits" or w.name in tied]
    if request.loss_chunks > 1:
        of_chunk = ceil(8 * scores / request.microbatches / request.loss_chunks)
        once = sum(in_use[w.name] for w in kernels if w in made)
        yield True, held + gathered - once + _beside_a_chunk(request, mesh, kernels, activations, of_chunk)
    else:
        yield True, held + gathered + inputs + ceil(8 * scores / request.microbatches)
        yield True, held + inputs + ceil(6 * scores / request.microbatches) + sum(in_use[w.name] for w in kernels)
    layer = _in_a_layer(request, mesh, trained, activations, eager=True)
    # The weights of the layer before are gathered ahead.
    yield True, held + before + gathered + layer
    yield False, of_layers + held + before + layer
    rows = ceil(3 * _bytes_of(activations, request.table.names.embedded) / request.microbatches)
    yield False, of_layers + held + before + rows + _at_the_embedding(request, mesh, trained)
    yield False, of_layers + sum(in_use[w.name] + summed[w.name] for w in made)


def _bytes_of(activations: Iterable[TensorPlan], name: str) -> int:
    return sum(activation.bytes_per_device for activation in activations if activation.name == name)


def _elements_of(activation: TensorPlan) -> int:
    return activation.bytes_per_device // DTYPE_BYTES[activation.dtype]


def _working_set(request: Request, activations: Sequence[TensorPlan], eager: bool) -> int:
    """Activations of one layer with their cotangents."""
    components: dict[str, int] = {}
    for a in activations:
        components[a.component] = components.get(a.component, 0) + a.bytes_per_device
    forward = sum(components.values())
    return forward + (max(components.values(), default=0) if eager or _on_tpu(request) else forward)


def _weights_in_use(
    request: Request, mesh: Mesh, weights: Sequence[TensorPlan], *, in_a_branch: bool, eager: bool
) -> int:
    """One layer's weights in use, and the unsharded gradients of those that are gathered. In a branch compilers make gradients one after
    the other, as they leave it sharded: the largest is there alone, and its accumulator."""
    in_use = {w.name: bytes_on_device(w.in_use, w.shape, request.dtype, mesh) for w in weights}
    gradients = [in_use[w.name] for w in weights if _is_gathered(mesh, w) or _scatters(request, mesh, w)]
    if _on_tpu(request):
        return sum(in_use.values()) + max(gradients, default=0)
    of_experts = [] if eager else [w for w in weights if w.component == "moe"]
    accumulators = [bytes_on_device(w.in_use, w.shape, "float32", mesh) for w in of_experts]
    if in_a_branch:
        return sum(in_use.values()) + max(gradients, default=0) + max(accumulators, default=0)
    return sum(in_use.values()) + sum(gradients) + sum(accumulators)


def _gathered_at_the_update(request: Request, mesh: Mesh, trained: Sequence[TensorPlan]) -> int:
    """What is gathered of weights of which each device has updated a part; in place one layer at a time is gathered, into the weights, or
    for as long as the codes that rest of it are made: less than a layer's gradients before."""
    if request.properties.updates_in_place:
        return 0
    whole = ((t, t.at_rest) for t in trained if t.at_rest is not None and not mesh.placed_alike(t.updated, t.at_rest))
    return sum(
        bytes_on_device(at_rest, t.shape, t.dtype, mesh) * layers_on_device(request, mesh, t) for t, at_rest in whole
    )


def _is_gathered(mesh: Mesh, tensor: TensorPlan) -> bool:
    """Whether a weight is another array in use than at rest."""
    assert tensor.at_rest is not None
    return not mesh.placed_alike(tensor.at_rest, tensor.in_use)


def _scatters(request: Request, mesh: Mesh, tensor: TensorPlan) -> bool:
    """Whether a weight's gradient is sharded in each microbatch in another way than the weight."""
    update = weight_update(request, mesh, tensor)
    return not mesh.placed_alike(update.held, update.at_rest)


def _on_tpu(request: Request) -> bool:
    """Whether the chip is a TPU. Its products read a matrix along either dim, and its kernel accumulates experts' gradients
    in its own memory. Other chips hold transposed copies and accumulators in addition."""
    return request.chip is not None and request.chip.accelerator == "TPU"


LANES = 128
"""Of a TPU's tile: https://docs.jax.dev/en/latest/pallas/tpu/details.html"""


def kept_runs(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> tuple[Run, ...]:
    """The layers that keep the same, with what is saved and what is made again, in the names of the arrays that there are."""
    rows = {tensor.name: tensor for tensor in tensors}
    same, names = same_arrays(request, rows, mesh), request.table.names
    if names.dispatched and (not expert_axes(request.layout, mesh) or request.layout.move_moe == "ring"):
        same |= {names.dispatched: names.received, names.returned: names.expert_outputs}
    return runs_of(request.table, request.remat, tuple(same.items()), made_again_with_others(request, mesh))


def saved_by_layers(
    request: Request,
    mesh: Mesh,
    tensors: Sequence[TensorPlan],
    runs: Sequence[Run],
    where: Literal["saved", "hosted"] = "saved",
) -> int:
    """What the forward pass of all layers saves for the backward pass of one microbatch: on the device, or on the host."""
    rows = {tensor.name: tensor for tensor in tensors}
    like = {one.output: one.like for one in request.table.operations}
    has_mask = where == "saved" and request.table.names.attended in rows and keep_a_mask(runs)
    saved = mask_bytes(request, mesh, rows) if has_mask else 0
    for run in runs:
        for name in getattr(run, where):
            if (row := rows.get(like.get(name) or name)) is not None:
                size = row.bytes_per_device if where == "hosted" else _padded_bytes(request, row)
                saved += (size + sums_of_scores(request, row)) * _share(request, mesh, run, row)
    return ceil(saved / request.microbatches)


def _padded_bytes(request: Request, row: TensorPlan) -> int:
    """Of an activation on the device. TPUs keep matrices in tiles of 128 lanes: a head of 64 elements takes the memory of 128."""
    if not _on_tpu(request) or row.in_use.dims[-1].logical_axis != "head_dim":
        return row.bytes_per_device
    return row.bytes_per_device // row.shape[-1] * ceil(row.shape[-1] / LANES) * LANES


def _share(request: Request, mesh: Mesh, run: Run, row: TensorPlan) -> int:
    """How many of a run's layers a device has."""
    return ceil(len(run.layers) / mesh.size(request.layout.axes_with("stage", row.component)))


def _kept_weights(request: Request, mesh: Mesh, trained: Sequence[TensorPlan], runs: Sequence[Run]) -> int:
    """Weights that stay gathered from the forward to the backward pass, and their copies in the dtype of the computation."""
    kept, numbers = Counter[str](), Counter(run.stack for run in runs)
    for run in runs:
        kept[run.stack] += 0 if run.gathers_again else len(run.layers)
    total = 0
    for tensor in trained:
        # The layers of several runs are read from the stack one by one, which is a copy too.
        several = request.properties.stacks_layers and numbers[tensor.stack or ""] > 1
        layers = kept[tensor.stack or ""]
        if layers and not (several or tensor.dtype != request.dtype or _is_gathered(mesh, tensor)):
            layers = 0
        if weight_reshardings(request, mesh, tensor)[tensor.component].kept:
            layers = tensor.num
        of_device = layers and ceil(layers / mesh.size(request.layout.axes_with("stage", tensor.component)))
        if of_device:
            total += bytes_on_device(tensor.in_use, tensor.shape, request.dtype, mesh) * of_device
    return total

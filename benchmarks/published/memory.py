"""The memory that the program of a source reserved, made of the plan of its step.

TorchTitan publishes what PyTorch's allocator has reserved at most (`reserved_bytes.all.peak`), of a program of its own. A plan counts
what our program has allocated. Between the two are parts that follow from the source's code and from the allocator's:

| part | why |
|---|---|
| scores | the loss is not ours: how many bytes each score of the vocabulary takes is in ``BYTES_OF_A_SCORE`` |
| unread products | eager selective checkpointing keeps what its list names, also where no backward pass reads it; a compiler drops it |
| gradients | they lie in the pool of another stream, which keeps its memory from the step before. At the loss a plan counts none |
| gathers | so do the results of all-gathers: those of two groups at one time, of which one has all weights outside of layers; a plan has the other |
| fragments | a share of all that, fitted to the steps that are not left out |

The allocator has a pool for each stream, and gives nothing back: `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py` allocates the
results of all-gathers and reduce-scatters in streams of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.published.planned import plan_of
from benchmarks.published.steps import Published, published
from shardwright.core.plan.memory import bytes_on_device
from shardwright.core.plan.plan import Plan, TensorPlan

GIB = 1024**3

BYTES_OF_A_SCORE: Mapping[str, int] = {
    # The scores in bfloat16, whose memory no float32 array fits in when they are freed; logarithms of probabilities, their
    # cotangent and that of the scores, all in float32.
    "eager": 14,
    # `loss_parallel` has one array of float32 more: `(grad_input + torch.exp(x)) * grad_output`.
    "eager, sharded": 18,
    # The scores and their cotangent in bfloat16; all between is in one kernel.
    "compiled": 4,
}
OURS = 8
"""Bytes of a score in the plan: float32, and two in bfloat16 (``core/plan/memory.py``)."""


def parts(step: Published) -> Mapping[str, int]:
    """Bytes of one device by part, without fragments."""
    assert step.loss is not None, step.name
    plan = plan_of(step)
    rows = plan.by_name
    scores = rows["logits.scores"]
    unread = sum(rows[name].bytes_per_device * rows[name].num for name in step.unread)
    return {
        "plan": plan.memory.total_bytes_per_device,
        "scores": scores.bytes_per_device // 4 * (BYTES_OF_A_SCORE[step.loss] - OURS),
        "unread products": unread // plan.request.microbatches,
        "gradients": plan.memory.gradients_bytes,
        "gathers": _gathers(plan),
    }


def _gathers(plan: Plan) -> int:
    """The weights outside of layers."""
    return sum(_in_use(plan, weight) for weight in plan.weights if weight.stack is None)


def _in_use(plan: Plan, weight: TensorPlan) -> int:
    return bytes_on_device(weight.in_use, weight.shape, plan.request.dtype, plan.mesh)


def fragments() -> float:
    """What was reserved beside all parts, as a share of them: the median over the steps that are not left out."""
    known = [step for step in published() if step.memory_gib is not None and not step.left_out]
    return median((step.memory_gib or 0.0) * GIB / sum(parts(step).values()) for step in known) - 1


def reserved_gib(step: Published) -> float | None:
    """What the program of a step's source is expected to reserve; None where its memory is not published."""
    return None if step.memory_gib is None else sum(parts(step).values()) * (1 + fragments()) / GIB

"""Bytes of the operations between products: norms, rotary embeddings, activations of the feed-forward layer, additions, the loss.

They take as long as memory takes to deliver what they read and to store what they write. How often a named activation is read or
written by them in a forward pass, in fused kernels:

| activation | passes | by what |
|---|---:|---|
| the residual stream | 6 | two norms read it; two additions read and write it |
| the input of attention, of a feed-forward layer, of the router | 1 | a norm writes it |
| the output of attention or of a feed-forward layer | 1 | an addition reads it |
| queries, keys | 2 | rotary embedding |
| a latent | 2 | a norm |
| keys and values made of a latent | 2 | they are put together from their parts |
| hidden units | 3 | gate and up are read, their product is written |
| tokens dispatched to experts, and returned | 2 | they are gathered by index |
| tokens sent to nodes first | 4 | they are gathered by index, there and back, and sums of nodes are added |
| scores of the vocabulary | 1 | the loss reads them; their cotangent is written and read |
| the gradient of their weight, in float32 | 2 for each chunk of the loss, if there are several | a chunk's is added to it |

Of rows of experts those count that a device receives, not the capacity of their buffers: the engines touch no others
(``cost/steps/routing.py``). Any other activation is written by a product alone and read by one. A backward pass moves twice the bytes of the forward pass, and
what is recomputed moves them once more.

Eager PyTorch runs one kernel for each operation. A layer of Llama, in bytes of bfloat16 for each element: a norm 36 (its input is cast
to float32, squared, averaged, multiplied, cast, and multiplied by the weight), not 4; rotary embedding 20 (in float32), not 4;
SwiGLU 10, not 6; an addition 6. With the sizes of Llama 3 8B this is 3.1 times the bytes of fused kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardwright.core.model.names import STREAM, TensorNames
from shardwright.core.plan.memory import bytes_on_device
from shardwright.core.plan.plan import Phase, Plan, TensorPlan, layers_on_device
from shardwright.core.policies.repeated import share_made_again
from shardwright.core.policies.runs import Run, runs_of
from shardwright.cost.steps.routing import EVEN, bytes_between_hops, bytes_in_vain, filled_share

EAGER_PASSES = 3.1
"""Bytes that eager PyTorch moves, in multiples of those of fused kernels: counted, see above."""


@lru_cache(maxsize=64)
def passes_of(names: TensorNames) -> Mapping[str, int]:
    """How often a forward pass reads or writes each activation of a model, as above."""
    passes = Counter({STREAM: 6})
    for times, of_these in (
        (3, names.hidden),
        (2, names.rotated),
        (2, names.latents),
        (2, names.made_from_taken),
        (2, (names.dispatched, names.received, names.returned)),
        (1, names.normed),
        (1, names.summands),
        (1, (names.expert_outputs, names.combined, names.scores)),
    ):
        passes.update({name: times for name in of_these if name})
    return dict(passes)


def elementwise_bytes(
    plan: Plan, shares: float = EVEN, static_on: str | None = None
) -> Mapping[tuple[str, Phase], float]:
    """Bytes that one device moves in a step, by component and phase, in fused kernels. ``shares``: of experts' rows (``routing.py``).
    ``static_on``: the network of the chips, where buffers of experts have a static size: what is touched of them in vain counts too."""
    found: dict[tuple[str, Phase], float] = {}
    runs, passes_by_name = runs_of(plan.request.table, plan.request.remat), passes_of(plan.request.table.names)
    for tensor in plan.activations:
        passes = passes_by_name.get(tensor.name, 0)
        if not passes:
            continue
        layers = layers_on_device(plan.request, plan.mesh, tensor)
        moved = passes * tensor.bytes_per_device * filled_share(plan, tensor, shares) * layers
        forward, backward = (0.0, 0.0) if static_on is None else bytes_in_vain(plan, tensor, static_on, shares)
        again = _again(tensor, runs, plan.request.table.names)
        phases: Mapping[Phase, float] = {
            "forward": moved + layers * forward,
            "recompute": again * (moved + layers * forward),
            "backward": 2.0 * moved + layers * backward,
        }
        for phase, size in phases.items():
            where = tensor.component, phase
            found[where] = found.get(where, 0.0) + size
    _add_nodes(plan, runs, found)
    if summed := _summed_over_chunks(plan):
        found["logits", "backward"] = found.get(("logits", "backward"), 0.0) + summed
    return found


def _add_nodes(plan: Plan, runs: Sequence[Run], found: dict[tuple[str, Phase], float]) -> None:
    """Tokens that are sent to nodes, and their sums of nodes."""
    dispatched = plan.by_name.get(plan.request.table.names.received)
    if dispatched is None or not (moved := bytes_between_hops(plan)):
        return
    moved *= layers_on_device(plan.request, plan.mesh, dispatched)
    again = share_made_again(runs, dispatched.name)
    passes: Mapping[Phase, float] = {"forward": 1.0, "recompute": again, "backward": 2.0}
    for phase, times in passes.items():
        found["router", phase] = found.get(("router", phase), 0.0) + times * moved


def _summed_over_chunks(plan: Plan) -> float:
    """Bytes of the sums of the weight's gradient over the chunks of the loss."""
    request = plan.request
    if request.loss_chunks == 1:
        return 0.0
    names = {one.name for one in request.table.weights if "logits" in (one.component, *one.uses)}
    size = sum(bytes_on_device(w.in_use, w.shape, "float32", plan.mesh) for w in plan.weights if w.name in names)
    return 2.0 * size * request.loss_chunks * request.microbatches


def _again(tensor: TensorPlan, runs: Sequence[Run], names: TensorNames) -> float:
    """The share of layers that make a tensor again. The norms and additions of the residual stream are those of its middle, and what a
    product makes again is read again by what follows it."""
    if tensor.component in ("logits", "embedding", "input"):
        return 0.0
    shares = (share_made_again(runs, name) for name in (names.between if tensor.name == STREAM else [tensor.name]))
    return max(shares, default=0.0)

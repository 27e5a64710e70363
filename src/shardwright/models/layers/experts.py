"""A layer of experts: the router, the exchange of tokens with the experts, and the sum of a token's experts.

B rows, L tokens, M embed, Z routing scores, A experts of a token. Tokens are dispatched in G groups of U; X experts have C slots for each
group, and F hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.model.precision import PRECISION, own_dtype
from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Value
from shardwright.models.parts.architecture import Experts


def routed_experts(draft: Draft, normed: Value, batch: Mapping[str, Value], form: Experts) -> Value:
    """What the routed experts add to the residual stream. ``normed``: the normed stream."""
    router, moe = draft.part("router"), draft.part("moe")
    dtype = own_dtype(PRECISION["router"].kept)
    valid = router.take(batch["segments"], "valid")
    x = router.take(normed, "input")
    scores = router.product("B L M, M Z -> B L Z", x, "kernel", "scores", dtype=dtype, weight_dtype=dtype)
    experts, chosen = router.route(
        scores,
        valid,
        ("experts", "chosen"),
        bias="bias" if form.balanced_by_bias else "",
        top_k=form.top_k,
        scoring=form.scoring,
        num_groups=form.num_groups,
        chosen_groups=form.chosen_groups,
        normalized=form.normalized,
        scale=form.scale,
        capacity_factor=form.capacity_factor,
    )

    x = router.take(x, "grouped", "B G U M")
    experts = router.take(experts, "grouped_experts", "B G U A")
    weights = router.take(chosen, "weights", "B G U A")
    rows = moe.take(router.dispatch(x, experts, "dispatched"), "dispatched", "X B G C M")
    gate = moe.product("X B G C M, X M F -> X B G C F", rows, "gate", "gate", F=form.width)
    up = moe.product("X B G C M, X M F -> X B G C F", rows, "up", "up", F=form.width)
    # The hidden units are made of gate and up again wherever they are multiplied: an engine has no array of them to keep.
    hidden = moe.gate(gate, up, "hidden", function="silu", kept=False)
    y = moe.product("X B G C F, X F M -> X B G C M", hidden, "down", "output")
    y = router.take(y, "returned", "B G U A M")
    # Where hidden units are sharded, an expert's output is partial. It is summed once, after a token's outputs are combined.
    return router.take(router.combine(y, weights, experts, "combined"), "output", "B L M")

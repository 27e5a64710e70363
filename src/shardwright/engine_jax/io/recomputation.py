"""What a layer keeps for its backward pass: its activations have the names of the model's table, and JAX saves those of the plan.

Kernels of attention save their output together with what their backward pass needs besides. Where a kernel gives that no name, what it
returns is known by the kernel's own name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.policies.policy import WEIGHTS
from shardwright.core.policies.runs import Run
from shardwright.engine_jax.io.layer_io import GATHERED

ATTENDED = "attention.attended"
KERNELS = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
"""cuDNN's forward pass of attention as JAX calls it, which gives its results no name."""


def recomputed(layer: Callable[..., Any], run: Run, num_layers: int) -> Callable[..., Any]:
    """The layer, whose backward pass has what the run saves and makes all else again. ``num_layers``: of the loop that it is the body of."""
    if run.keeps_all:
        return layer
    saved = {*run.saved, GATHERED, *(() if run.gathers_again else (WEIGHTS,))}
    policies = jax.checkpoint_policies
    if run.hosted:
        by_name = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(saved),
            names_which_can_be_offloaded=sorted(run.hosted),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        by_name = policies.save_only_these_names(*sorted(saved))

    # On the device, on the host, or made again.
    of_kernels = by_name(_naming(), name=ATTENDED)

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive.name in KERNELS or params.get("name") in KERNELS:
            return of_kernels
        return by_name(primitive, *operands, **params)

    # A loop over several layers prevents XLA from merging the recomputation with the forward pass. One over a single layer is unrolled.
    return jax.checkpoint(layer, policy=policy, prevent_cse=num_layers == 1)


@cache
def _naming() -> Any:
    """The primitive that gives an array its name."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, ATTENDED))(0.0).eqns[0].primitive

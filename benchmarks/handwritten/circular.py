"""Llama 3 in stages by hand, as MaxText has it (``layers/pipeline.py``, August 2026): one program, partitioned by the compiler.

All stages compute at the same time, one layer each, as a ``vmap`` over a dim that the axis ``stage`` shards. Behind each iteration what they
made moves one stage on. The rows wait in ``state_io``, where the outputs take their places; from the last stage of a repeat to the first
one of the next they go through ``circ_storage``, which has all rows on every stage. JAX differentiates the loop: each iteration saves its
input and computes the rest again.

S stages, R repeats, N microbatches, C of them to a stage, B rows of a microbatch, L tokens, M embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from benchmarks.handwritten.layers import Arrays, cos_and_sin, mean_cross_entropy, rms_norm, rotate, swiglu
from benchmarks.handwritten.sharding import Layout, gathered

SAVED = "iteration_input"
STAGE = "stage"


class Numbers(NamedTuple):
    """Numbers that do not follow from the shapes of the weights. ``loss_parts``: into how many parts the loss divides the rows."""

    eps: float
    frequencies: tuple[float, ...]
    dtype: jnp.dtype
    stages: int
    microbatches: int
    loss_parts: int = 1


class State(NamedTuple):
    """Between two iterations: inputs and outputs of all rows, what moves on, and what waits for the next repeat."""

    io_SCBLM: jax.Array
    shift_SBLM: jax.Array
    waiting_SNBLM: jax.Array | None
    moved_SBLM: jax.Array | None


def loss(params: Arrays, batch: Arrays, numbers: Numbers, layout: Layout, attend: Callable) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy of a batch; there are no token counts. ``attend``: attention on one device."""
    everywhere = Layout(layout.mesh, batch=(STAGE, *layout.batch), rest=layout.rest)
    ends = {name: params[name] for name in ("embedding.tokens", "logits.kernel")}
    ends = gathered(everywhere, ends, numbers.dtype)
    x_BLM = everywhere.constrain(ends["embedding.tokens"][batch["tokens"]], everywhere.batch, (), ())
    x_BLM = _through_layers(params, x_BLM, batch, numbers, layout, attend)
    x_BLM = everywhere.constrain(x_BLM, everywhere.batch, (), ())
    x_BLM = rms_norm(x_BLM, params["residual.final_norm"], numbers.eps)
    if numbers.loss_parts == 1:
        return mean_cross_entropy(x_BLM, ends["logits.kernel"], batch, everywhere), {}

    @jax.checkpoint
    def of_part(total: jax.Array, rows: tuple[jax.Array, Arrays]) -> tuple[jax.Array, None]:
        x_BLM, part = rows
        mean = mean_cross_entropy(x_BLM, ends["logits.kernel"], part, everywhere)
        return total + mean * jnp.sum(part["valid"]), None

    def in_parts(array: jax.Array) -> jax.Array:
        # Each part has rows of every device.
        parts = array.reshape(-1, numbers.loss_parts, *array.shape[1:]).swapaxes(0, 1)
        return everywhere.constrain(parts, (), everywhere.batch, *[()] * (array.ndim - 1))

    rows = jax.tree.map(in_parts, (x_BLM, {name: batch[name] for name in ("targets", "valid")}))
    total, _ = jax.lax.scan(of_part, jnp.zeros((), jnp.float32), rows)
    return total / jnp.maximum(jnp.sum(batch["valid"]), 1), {}


def _through_layers(
    params: Arrays, x_BLM: jax.Array, batch: Arrays, numbers: Numbers, layout: Layout, attend: Callable
) -> jax.Array:
    S, N = numbers.stages, numbers.microbatches
    stacked = {name.removeprefix("layers."): one for name, one in params.items() if name.startswith("layers.")}
    # A layer's number is repeat x stages + stage.
    layers_RS = {name: one.reshape(-1, S, *one.shape[1:]) for name, one in stacked.items()}
    repeats = next(iter(layers_RS.values())).shape[0]
    waits = repeats > 1 and N > S

    def of_stages(array: jax.Array) -> jax.Array:
        return layout.constrain(array, (STAGE,), layout.batch, *[()] * (array.ndim - 2))

    def of_all(array: jax.Array) -> jax.Array:
        return layout.constrain(array, (STAGE,), (), layout.batch, *[()] * (array.ndim - 3))

    spec = PartitionSpec(STAGE, layout.batch or None)

    def moved(array: jax.Array, by: int) -> jax.Array:
        @partial(jax.shard_map, mesh=layout.mesh, in_specs=spec, out_specs=spec)
        def permuted(array: jax.Array) -> jax.Array:
            return jax.lax.ppermute(array, STAGE, [(one, (one + by) % S) for one in range(S)])

        return permuted(array)

    def in_microbatches(array: jax.Array) -> jax.Array:
        return array.reshape(N, -1, *array.shape[1:])

    inputs_NBLM = in_microbatches(x_BLM)
    of_rows_NBL = {name: in_microbatches(batch[name]) for name in ("positions", "segments")}
    first_SBLM = of_stages(jnp.zeros((S, *inputs_NBLM.shape[1:]), x_BLM.dtype))
    number_S = jnp.arange(S)

    def layer(x_BLM: jax.Array, w: Arrays, positions_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        cos_sin = cos_and_sin(numbers.frequencies, 1.0, positions_BL)
        h = rms_norm(x_BLM, w["residual.attention_norm"], numbers.eps)
        q = rotate(jnp.einsum("BLM,MHD->BLHD", h, w["attention.q"]), cos_sin)
        k = rotate(jnp.einsum("BLM,MKD->BLKD", h, w["attention.k"]), cos_sin)
        v = jnp.einsum("BLM,MKD->BLKD", h, w["attention.v"])
        rows = PartitionSpec(layout.batch or None)
        # A kernel, which the compiler does not partition.
        on_devices = jax.shard_map(attend, mesh=layout.mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
        x_BLM = x_BLM + jnp.einsum("BLHD,HDM->BLM", on_devices(q, k, v, segments_BL), w["attention.o"])
        h = rms_norm(x_BLM, w["residual.feed_forward_norm"], numbers.eps)
        return x_BLM + swiglu(h, w, "mlp", Layout(layout.mesh, batch=layout.batch, rest=layout.rest))

    def weights_of(repeats_S: jax.Array) -> Arrays:
        def one(array_RS: jax.Array) -> jax.Array:
            return jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False), in_axes=(1, 0))(array_RS, repeats_S)

        # Of what is stored over other axes the whole is gathered, in each iteration.
        return {
            name: layout.constrain(
                one(array).astype(numbers.dtype if array.ndim > 3 else array.dtype),
                (STAGE,),
                *[()] * (array.ndim - 2),
            )
            for name, array in layers_RS.items()
        }

    def iteration(state: State, number: jax.Array) -> tuple[State, None]:
        done_S = jnp.maximum(number - number_S, 0)
        fed_SBLM = state.io_SCBLM[:, number % (N // S)]
        again_SBLM = state.shift_SBLM if state.waiting_SNBLM is None else state.waiting_SNBLM[:, number % N]
        entering_SBLM = of_stages(jnp.where(number < N, fed_SBLM, again_SBLM))
        is_first = (number_S == 0)[:, None, None, None]
        x_SBLM = checkpoint_name(of_stages(jnp.where(is_first, entering_SBLM, state.shift_SBLM)), SAVED)
        rows = [of_stages(of_rows_NBL[name][done_S % N]) for name in ("positions", "segments")]
        out_SBLM = of_stages(jax.vmap(layer, spmd_axis_name=STAGE)(x_SBLM, weights_of(done_S // N), *rows))
        shift_SBLM = moved(out_SBLM, 1)
        if waits or repeats == 1:
            shift_SBLM = jnp.where(is_first, 0, shift_SBLM)
        waiting_SNBLM, moved_SBLM = state.waiting_SNBLM, state.moved_SBLM
        if waiting_SNBLM is not None and moved_SBLM is not None:
            place = (number - (S - 1) - 1) % N
            waiting_SNBLM = of_all(waiting_SNBLM.at[:, place].set(moved(moved_SBLM, 1)))
            moved_SBLM = out_SBLM
        is_last = (number_S == S - 1)[:, None, None, None]
        io_SBLM = jnp.where(is_last, out_SBLM, moved(fed_SBLM, -1))
        io_SCBLM = of_all(state.io_SCBLM.at[:, number % (N // S)].set(io_SBLM))
        return State(io_SCBLM, shift_SBLM, waiting_SNBLM, moved_SBLM), None

    first = State(
        of_all(inputs_NBLM.reshape(S, N // S, *inputs_NBLM.shape[1:])),
        first_SBLM,
        of_all(jnp.zeros((S, *inputs_NBLM.shape), x_BLM.dtype)) if waits else None,
        first_SBLM if waits else None,
    )
    saved = jax.checkpoint_policies.save_only_these_names(SAVED)
    last, _ = jax.lax.scan(
        jax.checkpoint(iteration, policy=saved, prevent_cse=False), first, jnp.arange(N * repeats + S - 1)
    )
    # Where the first microbatch has come to lie.
    place = (N * (repeats - 1) + S - 1) % (N // S)
    return jnp.roll(last.io_SCBLM, -place, axis=1).reshape(x_BLM.shape)

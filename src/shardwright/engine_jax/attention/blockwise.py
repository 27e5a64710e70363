"""Softmax attention, a block of queries and a block of keys at a time: no array has a score for every pair of tokens.

The recurrences are those of flash attention (arXiv:2205.14135, algorithm 1; arXiv:2307.08691, section 3.1). Forward: a
running maximum, and sums of exp(score - maximum). Backward: the scores of a block are recomputed. Rows are processed one
after the other, and a block in which the mask excludes every pair is skipped.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim, E value dim; t and s are the tokens
of one block. Arrays without B are of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardwright.engine_jax.attention.blocks import Row, by_kv_head, by_token
from shardwright.engine_jax.attention.scores import MASKED_SCORE, AttentionMask, OnlineSoftmax
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.recomputation import ATTENDED

_Tree = TypeVar("_Tree")


def attend_in_blocks(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, block: int
) -> jax.Array:
    """``scores.attend``, BTHE, ``block`` tokens at a time.

    It saves its operands, the result, and one number for each query and head for the backward pass.
    """
    return _attend(scale, block, q_BTHD, k_BSKD, v_BSKE, mask)


def accumulate_attention_in_blocks(
    before: OnlineSoftmax | None,
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    mask: AttentionMask,
    scale: float,
    block: int,
) -> OnlineSoftmax:
    """``scores.accumulate_attention``, ``block`` tokens at a time.

    It saves its operands and two numbers for each query and head for the backward pass.
    """
    if before is None:
        B, T, H, _ = q_BTHD.shape
        K, E = v_BSKE.shape[2:]
        nothing = _nothing(K, H // K, T, E, computed("scores", q_BTHD.dtype))
        before = jax.tree.map(lambda array: jnp.broadcast_to(array, (B, *array.shape)), nothing)
    return _accumulate(scale, block, before, q_BTHD, k_BSKD, v_BSKE, mask)


def _nothing(K: int, G: int, T: int, E: int, dtype: jnp.dtype) -> OnlineSoftmax:
    """Attention to no keys."""
    none = jnp.zeros((K, G, T), dtype)
    return OnlineSoftmax(jnp.full_like(none, MASKED_SCORE), none, jnp.zeros((K, G, T, E), dtype))


def _barrier(operands: _Tree) -> _Tree:
    """The operands, behind an optimization barrier.

    The mask is the same in every layer. When JAX differentiates a loop over layers, it would therefore compute the masks of
    all blocks before the loop, for every pair of tokens and every head, and save them.
    """
    return lax.optimization_barrier(operands)


def _forward(
    row: Row,
    scale: float,
    before: Callable[[jax.Array], OnlineSoftmax],
    finish: Callable[[OnlineSoftmax], tuple[jax.Array, ...]],
    into: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """``finish(state)`` of each block of queries, written ``into`` arrays KGT....

    ``before``: the state of a block of queries after earlier keys.
    """
    queries, keys = row.queries, row.keys
    sum_of_values_KE = jnp.sum(row.v_KSE, axis=1, dtype=computed("attention", row.v_KSE.dtype))

    def of_queries(i: jax.Array, into: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        q_KGtD, earlier = queries.take(row.q_KGTD, i, 2), before(i)

        def and_keys(j: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
            visible_ts = row.visible(i, j)

            def attend() -> OnlineSoftmax:
                return _with_block(
                    state, q_KGtD, keys.take(row.k_KSD, j, 1), keys.take(row.v_KSE, j, 1), visible_ts, scale
                )

            return lax.cond(jnp.any(visible_ts), attend, lambda: state)

        state = lax.fori_loop(0, keys.number, and_keys, earlier)
        masked_KGt = state.max_BKGT == MASKED_SCORE
        state = OnlineSoftmax(
            state.max_BKGT,
            jnp.where(masked_KGt, earlier.normalizer_BKGT + keys.length, state.normalizer_BKGT),
            jnp.where(masked_KGt[..., None], earlier.sum_BKGTE + sum_of_values_KE[:, None, None, :], state.sum_BKGTE),
        )
        return tuple(queries.put(array, old, i, 2) for array, old in zip(finish(state), into, strict=True))

    return lax.fori_loop(0, queries.number, of_queries, into)


def _with_block(
    state: OnlineSoftmax, q_KGtD: jax.Array, k_KsD: jax.Array, v_KsE: jax.Array, visible_ts: jax.Array, scale: float
) -> OnlineSoftmax:
    scores_KGts = _wide("KGtD,KsD->KGts", q_KGtD, k_KsD) * scale
    scores_KGts = jnp.where(visible_ts[None, None], scores_KGts, MASKED_SCORE)
    max_KGt = jnp.maximum(state.max_BKGT, jnp.max(scores_KGts, axis=-1))
    probs_KGts = jnp.exp(scores_KGts - max_KGt[..., None])
    rescale_KGt = jnp.exp(state.max_BKGT - max_KGt)
    of_block_KGtE = _wide("KGts,KsE->KGtE", probs_KGts.astype(kept_in("probabilities", v_KsE.dtype)), v_KsE)
    return OnlineSoftmax(
        max_KGt,
        state.normalizer_BKGT * rescale_KGt + jnp.sum(probs_KGts, axis=-1),
        state.sum_BKGTE * rescale_KGt[..., None] + of_block_KGtE,
    )


class _Cotangents(NamedTuple):
    """What the backward pass of one row needs.

    A probability is exp(score - ``shift``). ``bias``: the term of the probabilities' cotangents that does not depend on the
    key. ``masked``: what fully masked queries add to the cotangent of each key's value.
    """

    shift_KGT: jax.Array
    bias_KGT: jax.Array
    d_out_KGTE: jax.Array
    masked_KE: jax.Array


def _backward(row: Row, cotangents: _Cotangents, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of one row's queries (THD), keys (SKD) and values (SKE)."""
    queries, keys = row.queries, row.keys

    def of_keys(j: jax.Array, done: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        dq_KGTD, dk_KSD, dv_KSE = done
        k_KsD, v_KsE = keys.take(row.k_KSD, j, 1), keys.take(row.v_KSE, j, 1)

        def and_queries(i: jax.Array, done):
            dq_KGTD, dk_KsD, dv_KsE = done
            visible_ts = row.visible(i, j)
            dq_KGtD = queries.take(dq_KGTD, i, 2)

            def gradients():
                q_KGtD, shift_KGt, bias_KGt, d_out_KGtE = (
                    queries.take(array, i, 2) for array in (row.q_KGTD, *cotangents[:3])
                )
                scores_KGts = _wide("KGtD,KsD->KGts", q_KGtD, k_KsD) * scale
                probs_KGts = jnp.where(visible_ts[None, None], jnp.exp(scores_KGts - shift_KGt[..., None]), 0)
                d_probs_KGts = _wide("KGtE,KsE->KGts", d_out_KGtE, v_KsE)
                d_scores_KGts = (probs_KGts * (d_probs_KGts + bias_KGt[..., None]) * scale).astype(
                    kept_in("cotangent", k_KsD.dtype)
                )
                probs_KGts = probs_KGts.astype(kept_in("probabilities", v_KsE.dtype))
                return (
                    dq_KGtD + _wide("KGts,KsD->KGtD", d_scores_KGts, k_KsD),
                    dk_KsD + _wide("KGts,KGtD->KsD", d_scores_KGts, q_KGtD),
                    dv_KsE + _wide("KGts,KGtE->KsE", probs_KGts, d_out_KGtE),
                )

            dq_KGtD, dk_KsD, dv_KsE = lax.cond(jnp.any(visible_ts), gradients, lambda: (dq_KGtD, dk_KsD, dv_KsE))
            return queries.put(dq_KGtD, dq_KGTD, i, 2), dk_KsD, dv_KsE

        dv_KsE = jnp.broadcast_to(cotangents.masked_KE[:, None, :], v_KsE.shape)
        none = dq_KGTD, jnp.zeros(k_KsD.shape, dq_KGTD.dtype), dv_KsE
        dq_KGTD, dk_KsD, dv_KsE = lax.fori_loop(0, queries.number, and_queries, none)
        return dq_KGTD, keys.put(dk_KsD, dk_KSD, j, 1), keys.put(dv_KsE, dv_KSE, j, 1)

    sums = jnp.zeros(row.q_KGTD.shape, computed("cotangent", row.q_KGTD.dtype))
    none = sums, jnp.zeros_like(row.k_KSD), jnp.zeros_like(row.v_KSE)
    dq_KGTD, dk_KSD, dv_KSE = lax.fori_loop(0, keys.number, of_keys, none)
    return (
        by_token(dq_KGTD).astype(kept_in("cotangent", row.q_KGTD.dtype)),
        jnp.moveaxis(dk_KSD, 1, 0),
        jnp.moveaxis(dv_KSE, 1, 0),
    )


def _wide(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, y, preferred_element_type=computed("scores", y.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(scale: float, block: int, q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask) -> jax.Array:
    return _attend_forward(scale, block, q_BTHD, k_BSKD, v_BSKE, mask)[0]


def _attend_forward(scale: float, block: int, *operands):
    def one(operands) -> tuple[jax.Array, jax.Array]:
        row = Row.of(block, *operands)
        (K, G, T, _), t, E = row.q_KGTD.shape, row.queries.size, row.v_KSE.shape[-1]
        dtype = row.q_KGTD.dtype
        into = lax.empty((K, G, T, E), kept_in("attention", dtype)), lax.empty((K, G, T), kept_in("scores", dtype))

        def finish(state: OnlineSoftmax) -> tuple[jax.Array, jax.Array]:
            return state.sum_BKGTE / state.normalizer_BKGT[..., None], state.max_BKGT + jnp.log(state.normalizer_BKGT)

        out_KGTE, log_sum_exp_KGT = _forward(
            row, scale, lambda _: _nothing(K, G, t, E, computed("scores", dtype)), finish, into
        )
        return by_token(out_KGTE), log_sum_exp_KGT

    out_BTHE, log_sum_exp_BKGT = checkpoint_name(lax.map(one, _barrier(operands)), ATTENDED)
    return out_BTHE, (operands, out_BTHE, log_sum_exp_BKGT)


def _attend_backward(scale: float, block: int, kept, d_out_BTHE: jax.Array):
    def one(operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands, out_THE, log_sum_exp_KGT, d_out_THE = operands
        row = Row.of(block, *operands)
        K, S, _ = row.k_KSD.shape
        out_KGTE, d_out_KGTE = by_kv_head(out_THE, K), by_kv_head(d_out_THE, K)
        wide = computed("cotangent", out_KGTE.dtype)
        bias_KGT = -jnp.sum(out_KGTE.astype(wide) * d_out_KGTE.astype(wide), axis=-1)
        # MASKED_SCORE plus the logarithm of the number of keys is MASKED_SCORE again in float32.
        masked_KE = _d_values_of_masked(d_out_KGTE, log_sum_exp_KGT) / S
        return _backward(row, _Cotangents(log_sum_exp_KGT, bias_KGT, d_out_KGTE, masked_KE), scale)

    return *lax.map(one, (*kept, d_out_BTHE)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _d_values_of_masked(d_out_KGTE: jax.Array, shift_KGT: jax.Array) -> jax.Array:
    """The sum over fully masked queries, KE."""
    wide = computed("cotangent", d_out_KGTE.dtype)
    return jnp.sum(jnp.where((shift_KGT == MASKED_SCORE)[..., None], d_out_KGTE, 0), axis=(1, 2), dtype=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _accumulate(
    scale: float, block: int, before: OnlineSoftmax, q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask
) -> OnlineSoftmax:
    return _accumulate_forward(scale, block, before, q_BTHD, k_BSKD, v_BSKE, mask)[0]


def _accumulate_forward(scale: float, block: int, before: OnlineSoftmax, *operands):
    def one(operands) -> OnlineSoftmax:
        before, row = operands[0], Row.of(block, *operands[1:])

        def earlier(i: jax.Array) -> OnlineSoftmax:
            return OnlineSoftmax(*(row.queries.take(array, i, 2) for array in before))

        return OnlineSoftmax(*_forward(row, scale, earlier, lambda state: state, tuple(before)))

    after = lax.map(one, _barrier((before, *operands)))
    return after, (operands, after.max_BKGT, jnp.exp(before.max_BKGT - after.max_BKGT))


def _accumulate_backward(scale: float, block: int, kept, d_after: OnlineSoftmax):
    operands, max_BKGT, rescale_BKGT = kept

    def one(operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands, max_KGT, d_normalizer_KGT, d_sum_KGTE = operands
        row = Row.of(block, *operands)
        cotangents = _Cotangents(
            max_KGT,
            d_normalizer_KGT,
            d_sum_KGTE.astype(kept_in("cotangent", row.v_KSE.dtype)),
            _d_values_of_masked(d_sum_KGTE, max_KGT),
        )
        return _backward(row, cotangents, scale)

    of_operands = lax.map(one, (operands, max_BKGT, d_after.normalizer_BKGT, d_after.sum_BKGTE))
    d_before = OnlineSoftmax(
        jnp.zeros_like(max_BKGT), d_after.normalizer_BKGT * rescale_BKGT, d_after.sum_BKGTE * rescale_BKGT[..., None]
    )
    return d_before, *of_operands, None


_accumulate.defvjp(_accumulate_forward, _accumulate_backward)

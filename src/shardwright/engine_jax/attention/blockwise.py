"""Softmax attention, a block of queries and a block of keys at a time: nothing has a score for every pair of tokens.

The recurrences are those of flash attention (arXiv:2205.14135, algorithm 1; arXiv:2307.08691, section 3.1). Forward: a
running maximum, and sums of e to the score less that maximum. Backward: the scores of a block are made again. Rows are
taken in turn, and a block in which no query sees any key is passed over.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim; t and s the tokens
of one block. Arrays without B are of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.engine_jax.attention.blocks import Row, by_kv_head, by_token
from shardwright.engine_jax.attention.scores import UNSEEN, AttentionMask, Running
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in

_Tree = TypeVar("_Tree")


def attend_in_blocks(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, block: int
) -> jax.Array:
    """``scores.attend``, BTHE, ``block`` tokens at a time.

    For the backward pass it keeps the result, and one number for each query and head.
    """
    return _attend(scale, block, q_BTHD, k_BSKD, v_BSKE, mask)


def with_keys_in_blocks(
    before: Running | None,
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    mask: AttentionMask,
    scale: float,
    block: int,
) -> Running:
    """``scores.with_keys``, ``block`` tokens at a time.

    For the backward pass it keeps two numbers for each query and head.
    """
    if before is None:
        B, T, H, _ = q_BTHD.shape
        K, E = v_BSKE.shape[2:]
        nothing = _nothing(K, H // K, T, E, computed("scores", q_BTHD.dtype))
        before = jax.tree.map(lambda array: jnp.broadcast_to(array, (B, *array.shape)), nothing)
    return _with_keys(scale, block, before, q_BTHD, k_BSKD, v_BSKE, mask)


def _nothing(K: int, G: int, T: int, E: int, dtype: jnp.dtype) -> Running:
    """Attention to no keys."""
    none = jnp.zeros((K, G, T), dtype)
    return Running(jnp.full_like(none, UNSEEN), none, jnp.zeros((K, G, T, E), dtype))


def _tied(operands: _Tree) -> _Tree:
    """All of them or none.

    What is seen is the same in every layer. Where JAX differentiates a loop over layers it would therefore make the
    masks of all blocks before the loop, for every pair of tokens and every head, and keep them.
    """
    return lax.optimization_barrier(operands)


def _forward(
    row: Row,
    scale: float,
    before: Callable[[jax.Array], Running],
    finish: Callable[[Running], tuple[jax.Array, ...]],
    into: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """What ``finish`` makes of each block of queries, put ``into`` arrays KGT...; ``before``: a block's earlier keys."""
    queries, keys = row.queries, row.keys
    every_KE = jnp.sum(row.v_KSE, axis=1, dtype=computed("attention", row.v_KSE.dtype))

    def of_queries(i: jax.Array, into: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        q_KGtD, earlier = queries.take(row.q_KGTD, i, 2), before(i)

        def and_keys(j: jax.Array, part: Running) -> Running:
            visible_ts = row.visible(i, j)

            def seen() -> Running:
                return _with_block(
                    part, q_KGtD, keys.take(row.k_KSD, j, 1), keys.take(row.v_KSE, j, 1), visible_ts, scale
                )

            return lax.cond(jnp.any(visible_ts), seen, lambda: part)

        part = lax.fori_loop(0, keys.number, and_keys, earlier)
        blind_KGt = part.largest_BKGT == UNSEEN
        part = Running(
            part.largest_BKGT,
            jnp.where(blind_KGt, earlier.weight_BKGT + keys.length, part.weight_BKGT),
            jnp.where(blind_KGt[..., None], earlier.sum_BKGTE + every_KE[:, None, None, :], part.sum_BKGTE),
        )
        return tuple(queries.put(array, old, i, 2) for array, old in zip(finish(part), into, strict=True))

    return lax.fori_loop(0, queries.number, of_queries, into)


def _with_block(
    part: Running, q_KGtD: jax.Array, k_KsD: jax.Array, v_KsE: jax.Array, visible_ts: jax.Array, scale: float
) -> Running:
    scores_KGts = _wide("KGtD,KsD->KGts", q_KGtD, k_KsD) * scale
    scores_KGts = jnp.where(visible_ts[None, None], scores_KGts, UNSEEN)
    largest_KGt = jnp.maximum(part.largest_BKGT, jnp.max(scores_KGts, axis=-1))
    probs_KGts = jnp.exp(scores_KGts - largest_KGt[..., None])
    kept_KGt = jnp.exp(part.largest_BKGT - largest_KGt)
    of_block_KGtE = _wide("KGts,KsE->KGtE", probs_KGts.astype(kept_in("probabilities", v_KsE.dtype)), v_KsE)
    return Running(
        largest_KGt,
        part.weight_BKGT * kept_KGt + jnp.sum(probs_KGts, axis=-1),
        part.sum_BKGTE * kept_KGt[..., None] + of_block_KGtE,
    )


class _Gradients(NamedTuple):
    """A share is e to the score less ``log``; of the shares' slopes, ``plus`` is what does not depend on the key.

    ``blind_KE``: what queries that see no key leave to the values of every key.
    """

    log_KGT: jax.Array
    plus_KGT: jax.Array
    d_out_KGTE: jax.Array
    blind_KE: jax.Array


def _backward(row: Row, cotangents: _Gradients, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of one row's queries (THD), keys (SKD) and values (SKE)."""
    queries, keys = row.queries, row.keys

    def of_keys(j: jax.Array, done: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        dq_KGTD, dk_KSD, dv_KSE = done
        k_KsD, v_KsE = keys.take(row.k_KSD, j, 1), keys.take(row.v_KSE, j, 1)

        def and_queries(i: jax.Array, done):
            dq_KGTD, dk_KsD, dv_KsE = done
            visible_ts = row.visible(i, j)
            dq_KGtD = queries.take(dq_KGTD, i, 2)

            def seen():
                q_KGtD, log_KGt, plus_KGt, d_out_KGtE = (
                    queries.take(array, i, 2) for array in (row.q_KGTD, *cotangents[:3])
                )
                scores_KGts = _wide("KGtD,KsD->KGts", q_KGtD, k_KsD) * scale
                probs_KGts = jnp.where(visible_ts[None, None], jnp.exp(scores_KGts - log_KGt[..., None]), 0)
                d_probs_KGts = _wide("KGtE,KsE->KGts", d_out_KGtE, v_KsE)
                d_scores_KGts = (probs_KGts * (d_probs_KGts + plus_KGt[..., None]) * scale).astype(
                    kept_in("cotangent", k_KsD.dtype)
                )
                probs_KGts = probs_KGts.astype(kept_in("probabilities", v_KsE.dtype))
                return (
                    dq_KGtD + _wide("KGts,KsD->KGtD", d_scores_KGts, k_KsD),
                    dk_KsD + _wide("KGts,KGtD->KsD", d_scores_KGts, q_KGtD),
                    dv_KsE + _wide("KGts,KGtE->KsE", probs_KGts, d_out_KGtE),
                )

            dq_KGtD, dk_KsD, dv_KsE = lax.cond(jnp.any(visible_ts), seen, lambda: (dq_KGtD, dk_KsD, dv_KsE))
            return queries.put(dq_KGtD, dq_KGTD, i, 2), dk_KsD, dv_KsE

        dv_KsE = jnp.broadcast_to(cotangents.blind_KE[:, None, :], v_KsE.shape)
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

        def finish(part: Running) -> tuple[jax.Array, jax.Array]:
            return part.sum_BKGTE / part.weight_BKGT[..., None], part.largest_BKGT + jnp.log(part.weight_BKGT)

        out_KGTE, log_KGT = _forward(
            row, scale, lambda _: _nothing(K, G, t, E, computed("scores", dtype)), finish, into
        )
        return by_token(out_KGTE), log_KGT

    out_BTHE, log_BKGT = lax.map(one, _tied(operands))
    return out_BTHE, (operands, out_BTHE, log_BKGT)


def _attend_backward(scale: float, block: int, kept, d_out_BTHE: jax.Array):
    def one(operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands, out_THE, log_KGT, d_out_THE = operands
        row = Row.of(block, *operands)
        K, S, _ = row.k_KSD.shape
        out_KGTE, d_out_KGTE = by_kv_head(out_THE, K), by_kv_head(d_out_THE, K)
        wide = computed("cotangent", out_KGTE.dtype)
        plus_KGT = -jnp.sum(out_KGTE.astype(wide) * d_out_KGTE.astype(wide), axis=-1)
        # What is added to the least number there is leaves it as it is.
        blind_KE = _of_the_blind(d_out_KGTE, log_KGT) / S
        return _backward(row, _Gradients(log_KGT, plus_KGT, d_out_KGTE, blind_KE), scale)

    return *lax.map(one, (*kept, d_out_BTHE)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _of_the_blind(d_out_KGTE: jax.Array, log_KGT: jax.Array) -> jax.Array:
    """The sum over queries that see no key, KE."""
    wide = computed("cotangent", d_out_KGTE.dtype)
    return jnp.sum(jnp.where((log_KGT == UNSEEN)[..., None], d_out_KGTE, 0), axis=(1, 2), dtype=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_keys(scale: float, block: int, before: Running, q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask) -> Running:
    return _with_keys_forward(scale, block, before, q_BTHD, k_BSKD, v_BSKE, mask)[0]


def _with_keys_forward(scale: float, block: int, before: Running, *operands):
    def one(operands) -> Running:
        before, row = operands[0], Row.of(block, *operands[1:])

        def earlier(i: jax.Array) -> Running:
            return Running(*(row.queries.take(array, i, 2) for array in before))

        return Running(*_forward(row, scale, earlier, lambda part: part, tuple(before)))

    after = lax.map(one, _tied((before, *operands)))
    return after, (operands, after.largest_BKGT, jnp.exp(before.largest_BKGT - after.largest_BKGT))


def _with_keys_backward(scale: float, block: int, kept, d_after: Running):
    operands, largest_BKGT, part_BKGT = kept

    def one(operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands, largest_KGT, d_weight_KGT, d_sum_KGTE = operands
        row = Row.of(block, *operands)
        cotangents = _Gradients(
            largest_KGT,
            d_weight_KGT,
            d_sum_KGTE.astype(kept_in("cotangent", row.v_KSE.dtype)),
            _of_the_blind(d_sum_KGTE, largest_KGT),
        )
        return _backward(row, cotangents, scale)

    of_operands = lax.map(one, (operands, largest_BKGT, d_after.weight_BKGT, d_after.sum_BKGTE))
    d_before = Running(
        jnp.zeros_like(largest_BKGT), d_after.weight_BKGT * part_BKGT, d_after.sum_BKGTE * part_BKGT[..., None]
    )
    return d_before, *of_operands, None


_with_keys.defvjp(_with_keys_forward, _with_keys_backward)

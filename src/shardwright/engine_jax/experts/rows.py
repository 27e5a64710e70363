"""Token-expert assignments sorted by where they go: the rows that are sent, and the sums of those that return.

X tokens, K assignments of a token, N = X * K assignments; R of them sorted; E experts, or nodes; M embed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in


class SortedAssignments(NamedTuple):
    """Token-expert assignments sorted by expert. Those that no expert processes are last.

    An assignment is a token with one of its experts, numbered ``token * K + which``. ``assignment_N``: the assignment at each
    place; ``place_N``: the place of each assignment; ``sizes_E``: assignments of each expert.
    """

    assignment_N: jax.Array
    place_N: jax.Array
    sizes_E: jax.Array


def sort_by_expert(expert_N: jax.Array, experts: int) -> SortedAssignments:
    """Assignments sorted by expert, earlier ones first within each. Numbers of ``experts`` and above are no expert."""
    number_N = jnp.arange(expert_N.shape[0], dtype=jnp.int32)
    _, assignment_N = jax.lax.sort((expert_N, number_N), num_keys=1, is_stable=True)
    _, place_N = jax.lax.sort((assignment_N, number_N), num_keys=1)
    return SortedAssignments(assignment_N, place_N, count_by_expert(expert_N, experts))


def within(sizes_E: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The sizes of those of sorted assignments that are among the first ``rows``, and how many are not.

    >>> sizes_E, beyond = within(jnp.asarray([3, 0, 4]), 5)
    >>> sizes_E.tolist(), int(beyond)
    ([3, 0, 2], 2)
    """
    end_E = jnp.minimum(jnp.cumsum(sizes_E), rows)
    kept_E = jnp.diff(end_E, prepend=0)
    return kept_E, jnp.sum(sizes_E - kept_E, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch_rows(x_XM: jax.Array, order: SortedAssignments, num_rows: jax.Array | int, buffer_rows: int) -> jax.Array:
    """The tokens of the first ``buffer_rows`` assignments, sorted by expert, RM. Only the first ``num_rows`` have a cotangent."""
    del num_rows
    return _at(x_XM, token_of(order, x_XM.shape[0], buffer_rows))


def _dispatch_rows_backward(
    buffer_rows: int, residuals: tuple[SortedAssignments, jax.Array | int, int], d_RM: jax.Array
) -> tuple[jax.Array, None, None]:
    # A token's cotangent is the sum over its assignments.
    order, num_rows, tokens = residuals
    del buffer_rows
    place_XK = order.place_N.reshape(tokens, -1)
    d_XM = _weighted_sum("cotangent", d_RM, place_XK, jnp.ones(place_XK.shape, d_RM.dtype), num_rows)
    return d_XM.astype(kept_in("cotangent", d_RM.dtype)), None, None


dispatch_rows.defvjp(
    lambda x_XM, order, num_rows, buffer_rows: (
        dispatch_rows(x_XM, order, num_rows, buffer_rows),
        (order, num_rows, x_XM.shape[0]),
    ),
    _dispatch_rows_backward,
)


@jax.custom_vjp
def combine_rows(
    y_RM: jax.Array, weights_XK: jax.Array, order: SortedAssignments, num_rows: jax.Array | int
) -> jax.Array:
    """Each token's weighted sum over its assignments, XM. ``y_RM``: sorted by expert; only its first ``num_rows`` count."""
    return _weighted_sum("combined", y_RM, order.place_N.reshape(weights_XK.shape), weights_XK, num_rows)


def _combine_rows_backward(residuals, d_XM: jax.Array):
    y_RM, weights_XK, order, num_rows = residuals
    buffer_rows, place_XK = y_RM.shape[0], order.place_N.reshape(weights_XK.shape)
    weight_R = jnp.where(
        jnp.arange(buffer_rows) < num_rows, _at(weights_XK.reshape(-1), order.assignment_N[:buffer_rows]), 0
    )
    # The sum is returned in the rows' dtype, so that rounding its cotangent to that dtype loses nothing.
    d_RM = _at(d_XM.astype(y_RM.dtype), token_of(order, place_XK.shape[0], buffer_rows))
    wide = computed("cotangent", y_RM.dtype)
    d_y_RM = (d_RM.astype(wide) * weight_R[:, None]).astype(kept_in("cotangent", y_RM.dtype))

    def cotangent(place_X: jax.Array) -> jax.Array:
        return jnp.sum(_rows_at(y_RM, place_X, num_rows, wide) * d_XM, axis=1)

    return d_y_RM, jax.lax.map(cotangent, place_XK.T).T.astype(weights_XK.dtype), None, None


combine_rows.defvjp(lambda *given: (combine_rows(*given), given), _combine_rows_backward)


def _weighted_sum(
    what: str, rows_RM: jax.Array, place_XK: jax.Array, weights_XK: jax.Array, num_rows: jax.Array | int
) -> jax.Array:
    """Each token's weighted sum over its assignments, XM, in the dtype in which ``what`` is computed.

    One assignment of each token after the other: all at once would need K times the rows, however few are on this device.
    """

    def add(sum_XM: jax.Array, assignment: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place_X, weight_X = assignment
        return sum_XM + _rows_at(rows_RM, place_X, num_rows, wide) * weight_X[:, None], None

    wide = computed(what, rows_RM.dtype)
    zeros_XM = jnp.zeros((place_XK.shape[0], rows_RM.shape[1]), wide)
    return jax.lax.scan(add, zeros_XM, (place_XK.T, weights_XK.T.astype(wide)))[0]


def _rows_at(rows_RM: jax.Array, place_X: jax.Array, num_rows: jax.Array | int, dtype: jnp.dtype) -> jax.Array:
    """The row of one assignment of each token; zeros if no expert processed it."""
    row_XM = _at(rows_RM, jnp.minimum(place_X, rows_RM.shape[0] - 1)).astype(dtype)
    return jnp.where((place_X < num_rows)[:, None], row_XM, 0.0)


def token_of(order: SortedAssignments, tokens: int, buffer_rows: int) -> jax.Array:
    """The token of each of the first ``buffer_rows`` assignments."""
    return order.assignment_N[:buffer_rows] // (order.assignment_N.shape[0] // tokens)


def one_hot(expert: jax.Array, experts: int) -> jax.Array:
    """A boolean one-hot encoding along a new last dim."""
    return expert[..., None] == jnp.arange(experts, dtype=expert.dtype).reshape((1,) * expert.ndim + (experts,))


def count_by_expert(expert: jax.Array, experts: int) -> jax.Array:
    """The number of assignments of each expert."""
    return jnp.sum(one_hot(expert.reshape(-1), experts), axis=0, dtype=jnp.int32)


def _at(array_XM: jax.Array, index: jax.Array) -> jax.Array:
    return array_XM.at[index].get(mode="promise_in_bounds")

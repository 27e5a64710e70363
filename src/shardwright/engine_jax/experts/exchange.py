"""Rows to the devices that hold their experts, and back: as many as there are, wherever each goes.

N rows of a device, sorted by expert; R rows of the buffer of what comes, sorted by expert too and, within one, by the
device that they came from; M embed; D devices that share the experts, E experts of one of them; C rows of a chunk.

Everybody's counts are gathered first, a few integers, so that each device knows where every row of the group lies. The
rows then travel by a ragged all-to-all, each once and nothing else. Where the backend has none (CPU), chunks travel in
its place that have room for the most that one device could send to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.engine_jax.io import redistribute
from shardwright.engine_jax.io.layer_io import TokenRing, index_of, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What of an exchange is known before any token is: its axes, major first, and its sizes.

    ``rows``: those of a device before. ``buffer_rows``: of the buffer of what comes. ``chunk``: the most that go from one
    device to one other.
    """

    axes: tuple[str, ...]
    rows: int
    buffer_rows: int
    chunk: int


class Routes(NamedTuple):
    """Where the rows of one device go, and where those that come lie.

    ``sizes_E``: rows that each of its experts gets. ``overflow``: rows of its own that found no room. ``sent_DE`` and
    ``came_DE``: rows to and from each device by expert; ``first_D``: where those for each device begin among its own.
    ``written_D``: where its rows begin in each device's buffer before it is sorted; ``place_DE``: where, sorted, those
    from each device begin. ``theirs_D``: where, on the device that they came from, the rows for this one begin.
    """

    sizes_E: jax.Array
    overflow: jax.Array
    sent_DE: jax.Array
    came_DE: jax.Array
    first_D: jax.Array
    written_D: jax.Array
    place_DE: jax.Array
    theirs_D: jax.Array


def routes_of(counts: jax.Array, way: Exchange) -> Routes:
    """The routes of a device's rows; ``counts`` of them by expert of all devices, in the order of the devices.

    Where more come than there is room for, the last of them stay behind, and are counted by the device whose they are.
    """
    me, devices = index_of(way.axes), size_of(way.axes)
    all_counts = lax.all_gather(counts, way.axes) if way.axes else counts[None]
    from_to_SDE = all_counts.reshape(devices, devices, -1)
    # In a buffer, expert by expert and, within one, device by device.
    of_buffer_DES = from_to_SDE.transpose(1, 2, 0)
    end_DES = jnp.cumsum(of_buffer_DES.reshape(devices, -1), axis=1).reshape(of_buffer_DES.shape)
    place_DES = jnp.minimum(end_DES - of_buffer_DES, way.buffer_rows)
    kept_SDE = (jnp.minimum(end_DES, way.buffer_rows) - place_DES).transpose(2, 0, 1)
    kept_SD = jnp.sum(kept_SDE, axis=2)
    asked_SD = jnp.sum(from_to_SDE, axis=2)
    first_SD = jnp.cumsum(asked_SD, axis=1) - asked_SD
    written_SD = jnp.cumsum(kept_SD, axis=0) - kept_SD
    came_DE = kept_SDE[:, me]
    return Routes(
        sizes_E=jnp.sum(came_DE, axis=0),
        overflow=jnp.sum(asked_SD[me] - kept_SD[me], dtype=jnp.int32),
        sent_DE=kept_SDE[me],
        came_DE=came_DE,
        first_D=first_SD[me],
        written_D=written_SD[me],
        place_DE=place_DES[me].T,
        theirs_D=first_SD[:, me],
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_experts(rows_NM: jax.Array, routes: Routes, way: Exchange) -> jax.Array:
    """The buffer of what came, RM, sorted by expert. Rows after those that came hold anything that is a number."""
    return lax.platform_dependent(
        rows_NM, routes, cpu=partial(_there_in_chunks, way=way), default=partial(_there_ragged, way=way)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_experts(buffer_RM: jax.Array, routes: Routes, way: Exchange) -> jax.Array:
    """What became of each row, NM, where it came from: the transpose of the way there. Zeros where none was sent."""
    return lax.platform_dependent(
        buffer_RM, routes, cpu=partial(_back_in_chunks, way=way), default=partial(_back_ragged, way=way)
    )


to_experts.defvjp(
    lambda rows_NM, routes, way: (to_experts(rows_NM, routes, way), routes),
    lambda way, routes, d_buffer_RM: (from_experts(d_buffer_RM, routes, way), None),
)
from_experts.defvjp(
    lambda buffer_RM, routes, way: (from_experts(buffer_RM, routes, way), routes),
    lambda way, routes, d_rows_NM: (to_experts(d_rows_NM, routes, way), None),
)


def gathered(array: jax.Array, around: TokenRing | None) -> jax.Array:
    """The parts of all devices along dim 0, for each of them to use in its own way."""
    return cast(jax.Array, _gathered(array, around)) if around else array


def summed_parts(array: jax.Array, around: TokenRing | None) -> jax.Array:
    """Of the sum over all devices this one's part of dim 0: the transpose of gathering."""
    return cast(jax.Array, _summed_parts(array, around)) if around else array


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(array: jax.Array, around: TokenRing) -> jax.Array:
    for step in around.gather:
        array = redistribute.gathered(array, step, 0)
    return array


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_parts(array: jax.Array, around: TokenRing) -> jax.Array:
    for step in around.scatter:
        array = redistribute.scattered(array, step, 0)
    return array


_gathered.defvjp(
    lambda array, around: (_gathered(array, around), None), lambda around, _, d_array: (_summed_parts(d_array, around),)
)
_summed_parts.defvjp(
    lambda array, around: (_summed_parts(array, around), None), lambda around, _, d_array: (_gathered(d_array, around),)
)


def _there_ragged(rows_NM: jax.Array, routes: Routes, *, way: Exchange) -> jax.Array:
    sent_D, came_D = jnp.sum(routes.sent_DE, axis=1), jnp.sum(routes.came_DE, axis=1)
    came_RM = lax.ragged_all_to_all(
        rows_NM,
        jnp.zeros((way.buffer_rows, *rows_NM.shape[1:]), rows_NM.dtype),
        routes.first_D,
        sent_D,
        routes.written_D,
        came_D,
        axis_name=way.axes,
    )
    return _sorted_by_expert(came_RM, routes, jnp.cumsum(came_D) - came_D, way)


def _back_ragged(buffer_RM: jax.Array, routes: Routes, *, way: Exchange) -> jax.Array:
    sent_D, came_D = jnp.sum(routes.sent_DE, axis=1), jnp.sum(routes.came_DE, axis=1)
    place_R = _through(
        jnp.arange(way.buffer_rows, dtype=jnp.int32), _starts(routes.came_DE.reshape(-1)), routes.place_DE.reshape(-1)
    )
    return lax.ragged_all_to_all(
        _rows(buffer_RM, place_R),
        jnp.zeros((way.rows, *buffer_RM.shape[1:]), buffer_RM.dtype),
        _starts(came_D),
        came_D,
        routes.theirs_D,
        sent_D,
        axis_name=way.axes,
    )


def _there_in_chunks(rows_NM: jax.Array, routes: Routes, *, way: Exchange) -> jax.Array:
    within_C = jnp.arange(way.chunk, dtype=jnp.int32)
    chunks_DCM = _rows(rows_NM, routes.first_D[:, None] + within_C[None])
    came_DCM = lax.all_to_all(chunks_DCM, way.axes, split_axis=0, concat_axis=0)
    begins_D = jnp.arange(came_DCM.shape[0], dtype=jnp.int32) * way.chunk
    return _sorted_by_expert(came_DCM.reshape(-1, rows_NM.shape[-1]), routes, begins_D, way)


def _back_in_chunks(buffer_RM: jax.Array, routes: Routes, *, way: Exchange) -> jax.Array:
    within_C = jnp.arange(way.chunk, dtype=jnp.int32)
    place_DC = jax.vmap(_through, in_axes=(None, 0, 0))(within_C, _starts(routes.came_DE), routes.place_DE)
    back_DCM = lax.all_to_all(_rows(buffer_RM, place_DC), way.axes, split_axis=0, concat_axis=0)
    number_N, devices = jnp.arange(way.rows, dtype=jnp.int32), back_DCM.shape[0]
    chunk_N = _through(number_N, routes.first_D, jnp.arange(devices, dtype=jnp.int32) * way.chunk)
    last_D = routes.first_D + jnp.sum(routes.sent_DE, axis=1)
    sent_N = jnp.any((number_N[:, None] >= routes.first_D[None]) & (number_N[:, None] < last_D[None]), axis=1)
    return jnp.where(sent_N[:, None], _rows(back_DCM.reshape(-1, buffer_RM.shape[-1]), chunk_N), 0)


def _sorted_by_expert(came_XM: jax.Array, routes: Routes, begins_D: jax.Array, way: Exchange) -> jax.Array:
    """The buffer, of rows that lie device by device from ``begins_D`` on."""
    lies_ED = (begins_D[:, None] + _starts(routes.came_DE)).T
    source_R = _through(
        jnp.arange(way.buffer_rows, dtype=jnp.int32), routes.place_DE.T.reshape(-1), lies_ED.reshape(-1)
    )
    return _rows(came_XM, source_R)


def _through(number_I: jax.Array, start_Q: jax.Array, begin_Q: jax.Array) -> jax.Array:
    """Where each number lies when the piece that starts at ``start_Q`` lies at ``begin_Q``.

    ``start_Q`` rises; of pieces that start together all but the last are empty.

    >>> _through(jnp.arange(6), jnp.asarray([0, 2, 2]), jnp.asarray([7, 0, 3])).tolist()
    [7, 8, 3, 4, 5, 6]
    """
    shift_Q = begin_Q - start_Q
    step_Q = jnp.diff(shift_Q, prepend=0)
    return number_I + jnp.sum(jnp.where(number_I[:, None] >= start_Q[None], step_Q[None], 0), axis=1, dtype=jnp.int32)


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each begins when all follow each other along the last dim."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _rows(array_XM: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index; for an index that is none of a row's, the nearest row."""
    return array_XM.at[index].get(mode="clip")

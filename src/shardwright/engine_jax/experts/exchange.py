"""All-to-all of rows to the devices of their experts, and back, with any number of rows for each device.

N rows of a device, sorted by expert; R rows of the buffer of received rows, sorted by expert and, within an expert, by source
device; M embed; D devices that share the experts, E experts of one of them; C rows of a chunk. S is D as
source devices; Q pieces of consecutive indices, I indices of any rows; X any rows.

First an all-gather of all devices' counts, a few integers, tells each device the offset of every row of the group. Then a
ragged all-to-all sends each row once and nothing else. If the backend has no ragged all-to-all (CPU), an ordinary
all-to-all sends chunks. A chunk has the capacity for the most rows that one device can send to another.

With a quantizer codes and scales are sent, one after the other, and what is received are their values (``core/quantization/dispatch.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formats import E8M0
from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_jax.io import redistribute
from shardwright.engine_jax.io.layer_io import TokenRing, index_of, size_of
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.operands import codes_of

BLOCKS_OF_A_SHARE = 4
"""Blocks into which the even share of a device's rows is divided where rows are copied: at most a quarter of it is copied in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is static in an exchange: its axes, major first, and its sizes.

    ``rows``: those that a device sends. ``buffer_rows``: those of the buffer of received rows. ``chunk``: the most rows that
    one device sends to one other.
    """

    axes: tuple[str, ...]
    rows: int
    buffer_rows: int
    chunk: int


class Routes(NamedTuple):
    """The sizes and offsets of the rows that one device sends and receives.

    ``sizes_E``: received rows of each of its experts. ``overflow``: rows that it does not send, because the receiver's buffer
    is full. ``sent_DE`` and ``received_DE``: rows to and from each device by expert. ``input_offset_D``: of the rows for each
    device among its own rows. ``output_offset_D``: of its rows in each device's buffer before sorting. ``buffer_offset_DE``:
    of the rows from each device in the sorted buffer. ``source_offset_D``: of the rows for this device on their source.
    """

    sizes_E: jax.Array
    overflow: jax.Array
    sent_DE: jax.Array
    received_DE: jax.Array
    input_offset_D: jax.Array
    output_offset_D: jax.Array
    buffer_offset_DE: jax.Array
    source_offset_D: jax.Array


def routes_of(counts: jax.Array, exchange: Exchange) -> Routes:
    """The routes of a device's rows. ``counts``: its rows by expert, for the experts of all devices in the order of devices.

    If a device would receive more rows than its buffer has, the last of them are not sent. Their source counts them.
    """
    own, devices = index_of(exchange.axes), size_of(exchange.axes)
    all_counts = lax.all_gather(counts, exchange.axes) if exchange.axes else counts[None]
    from_to_SDE = all_counts.reshape(devices, devices, -1)
    # A buffer is ordered by expert and, within an expert, by source device.
    of_buffer_DES = from_to_SDE.transpose(1, 2, 0)
    end_DES = jnp.cumsum(of_buffer_DES.reshape(devices, -1), axis=1).reshape(of_buffer_DES.shape)
    buffer_offset_DES = jnp.minimum(end_DES - of_buffer_DES, exchange.buffer_rows)
    kept_SDE = (jnp.minimum(end_DES, exchange.buffer_rows) - buffer_offset_DES).transpose(2, 0, 1)
    kept_SD = jnp.sum(kept_SDE, axis=2)
    count_SD = jnp.sum(from_to_SDE, axis=2)
    input_offset_SD = jnp.cumsum(count_SD, axis=1) - count_SD
    output_offset_SD = jnp.cumsum(kept_SD, axis=0) - kept_SD
    received_DE = kept_SDE[:, own]
    return Routes(
        sizes_E=jnp.sum(received_DE, axis=0),
        overflow=jnp.sum(count_SD[own] - kept_SD[own], dtype=jnp.int32),
        sent_DE=kept_SDE[own],
        received_DE=received_DE,
        input_offset_D=input_offset_SD[own],
        output_offset_D=output_offset_SD[own],
        buffer_offset_DE=buffer_offset_DES[own].T,
        source_offset_D=input_offset_SD[:, own],
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def to_experts(rows_NM: jax.Array, routes: Routes, exchange: Exchange, quantizer: Quantizer | None = None) -> jax.Array:
    """The buffer of received rows, RM, sorted by expert. Rows after the received ones hold arbitrary numbers, NaN among them.

    ``quantizer``: of the rows; their cotangents are sent back as they are.
    """

    send = partial(numbers_to_experts, routes=routes, exchange=exchange)
    return send(rows_NM) if quantizer is None else _as_codes(rows_NM, quantizer, send)


def numbers_to_experts(rows_NX: jax.Array, routes: Routes, exchange: Exchange) -> jax.Array:
    """The buffer of received rows of numbers that have no gradient, as ``to_experts`` has it."""
    return lax.platform_dependent(
        rows_NX,
        routes,
        cpu=partial(_to_experts_in_chunks, exchange=exchange),
        default=partial(_to_experts_ragged, exchange=exchange),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def from_experts(
    buffer_RM: jax.Array, routes: Routes, exchange: Exchange, quantizer: Quantizer | None = None
) -> jax.Array:
    """Each row's result, NM, back on its source: the transpose of ``to_experts``. Zeros for rows that were not sent.

    ``quantizer``: of the rows' cotangents, which are sent to the experts.
    """
    del quantizer
    return lax.platform_dependent(
        buffer_RM,
        routes,
        cpu=partial(_from_experts_in_chunks, exchange=exchange),
        default=partial(_from_experts_ragged, exchange=exchange),
    )


to_experts.defvjp(
    lambda rows_NM, routes, exchange, quantizer: (to_experts(rows_NM, routes, exchange, quantizer), routes),
    lambda exchange, _, routes, d_buffer_RM: (from_experts(d_buffer_RM, routes, exchange), None),
)
from_experts.defvjp(
    lambda buffer_RM, routes, exchange, _: (from_experts(buffer_RM, routes, exchange), routes),
    lambda exchange, quantizer, routes, d_rows_NM: (to_experts(d_rows_NM, routes, exchange, quantizer), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_quantized_cotangent(rows_RM: jax.Array, quantizer: Quantizer | None) -> jax.Array:
    """The rows as they are; their cotangents are the values of codes, as those that ``from_experts`` sends."""
    del quantizer
    return rows_RM


with_quantized_cotangent.defvjp(
    lambda rows_RM, _: (rows_RM, None),
    lambda quantizer, _, d_rows_RM: (d_rows_RM if quantizer is None else _as_codes(d_rows_RM, quantizer),),
)


def gathered(array: jax.Array, ring: TokenRing | None, quantizer: Quantizer | None = None) -> jax.Array:
    """All devices' shards along dim 0. Each device uses them differently, so the gradient is a reduce-scatter. ``quantizer``: of the rows,
    without a ring too; their cotangents are as they are."""
    return cast(jax.Array, _gathered(array, ring, quantizer)) if ring or quantizer else array


def reduce_scattered(array: jax.Array, ring: TokenRing | None) -> jax.Array:
    """This device's shard along dim 0 of the sum over all devices: the transpose of ``gathered``."""
    return cast(jax.Array, _reduce_scattered(array, ring)) if ring else array


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(array: jax.Array, ring: TokenRing | None, quantizer: Quantizer | None) -> jax.Array:
    def send(array: jax.Array) -> jax.Array:
        return redistribute.gathered(array, ring.gather, 0) if ring else array

    return send(array) if quantizer is None else _as_codes(array, quantizer, send)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_scattered(array: jax.Array, ring: TokenRing) -> jax.Array:
    return redistribute.scattered(array, ring.scatter, 0)


_gathered.defvjp(
    lambda array, ring, quantizer: (_gathered(array, ring, quantizer), None),
    lambda ring, _, __, d_array: (reduce_scattered(d_array, ring),),
)
_reduce_scattered.defvjp(
    lambda array, ring: (_reduce_scattered(array, ring), None),
    lambda ring, _, d_array: (_gathered(d_array, ring, None),),
)


def _as_codes(
    rows_XM: jax.Array, quantizer: Quantizer, send: Callable[[jax.Array], jax.Array] = lambda array: array
) -> jax.Array:
    """The values of what is received where codes and scales of rows are sent."""
    own, as_bytes = codes_of(rows_XM, quantizer), quantizer.scale.dtype == E8M0
    codes = send(own.codes)
    scales = send(ARRAYS.bytes_of(own.scales) if as_bytes else own.scales)
    if as_bytes:
        scales = lax.bitcast_convert_type(scales, jnp.dtype(E8M0))
    received = Quantized(codes=codes, scales=scales, of_tensor=None)
    values = dequantize(received, (codes.shape[0], rows_XM.shape[1]), quantizer, ARRAYS)
    return jnp.asarray(values, rows_XM.dtype)


def _to_experts_ragged(rows_NM: jax.Array, routes: Routes, *, exchange: Exchange) -> jax.Array:
    sent_D, received_D = jnp.sum(routes.sent_DE, axis=1), jnp.sum(routes.received_DE, axis=1)
    received_RM = lax.ragged_all_to_all(
        rows_NM,
        lax.empty((exchange.buffer_rows, *rows_NM.shape[1:]), rows_NM.dtype),
        routes.input_offset_D,
        sent_D,
        routes.output_offset_D,
        received_D,
        axis_name=exchange.axes,
    )
    return _sorted_by_expert(received_RM, routes, jnp.cumsum(received_D) - received_D, exchange)


def _from_experts_ragged(buffer_RM: jax.Array, routes: Routes, *, exchange: Exchange) -> jax.Array:
    sent_D, received_D = jnp.sum(routes.sent_DE, axis=1), jnp.sum(routes.received_DE, axis=1)
    by_source_RM = _moved(
        buffer_RM,
        _offsets(routes.received_DE.reshape(-1)),
        routes.buffer_offset_DE.reshape(-1),
        jnp.sum(received_D),
        exchange,
    )
    return lax.ragged_all_to_all(
        by_source_RM,
        jnp.zeros((exchange.rows, *buffer_RM.shape[1:]), buffer_RM.dtype),
        _offsets(received_D),
        received_D,
        routes.source_offset_D,
        sent_D,
        axis_name=exchange.axes,
    )


def _to_experts_in_chunks(rows_NM: jax.Array, routes: Routes, *, exchange: Exchange) -> jax.Array:
    within_C = jnp.arange(exchange.chunk, dtype=jnp.int32)
    chunks_DCM = _rows(rows_NM, routes.input_offset_D[:, None] + within_C[None])
    received_DCM = lax.all_to_all(chunks_DCM, exchange.axes, split_axis=0, concat_axis=0)
    offset_D = jnp.arange(received_DCM.shape[0], dtype=jnp.int32) * exchange.chunk
    return _sorted_by_expert(received_DCM.reshape(-1, rows_NM.shape[-1]), routes, offset_D, exchange)


def _from_experts_in_chunks(buffer_RM: jax.Array, routes: Routes, *, exchange: Exchange) -> jax.Array:
    within_C = jnp.arange(exchange.chunk, dtype=jnp.int32)
    source_DC = jax.vmap(_relocated, in_axes=(None, 0, 0))(
        within_C, _offsets(routes.received_DE), routes.buffer_offset_DE
    )
    back_DCM = lax.all_to_all(_rows(buffer_RM, source_DC), exchange.axes, split_axis=0, concat_axis=0)
    number_N, devices = jnp.arange(exchange.rows, dtype=jnp.int32), back_DCM.shape[0]
    source_N = _relocated(number_N, routes.input_offset_D, jnp.arange(devices, dtype=jnp.int32) * exchange.chunk)
    last_D = routes.input_offset_D + jnp.sum(routes.sent_DE, axis=1)
    sent_N = jnp.any((number_N[:, None] >= routes.input_offset_D[None]) & (number_N[:, None] < last_D[None]), axis=1)
    return jnp.where(sent_N[:, None], _rows(back_DCM.reshape(-1, buffer_RM.shape[-1]), source_N), 0)


def _sorted_by_expert(received_XM: jax.Array, routes: Routes, offset_D: jax.Array, exchange: Exchange) -> jax.Array:
    """The sorted buffer, from rows that are ordered by source device, those of each from ``offset_D`` on."""
    offset_ED = (offset_D[:, None] + _offsets(routes.received_DE)).T
    return _moved(
        received_XM, routes.buffer_offset_DE.T.reshape(-1), offset_ED.reshape(-1), jnp.sum(routes.sizes_E), exchange
    )


def _moved(
    array_XM: jax.Array, from_Q: jax.Array, to_Q: jax.Array, num_rows: jax.Array, exchange: Exchange
) -> jax.Array:
    """A buffer of rows, RM: ranges of rows as ``_relocated`` has them. Only blocks with one of the first ``num_rows`` are touched, since
    a buffer with capacity for the worst case is several times as large as what is received."""
    block = min(exchange.buffer_rows, max(1, exchange.rows // BLOCKS_OF_A_SHARE))

    def one_block(number: jax.Array, done_RM: jax.Array) -> jax.Array:
        # A block that would exceed the buffer begins earlier.
        start = jnp.minimum(number * block, exchange.buffer_rows - block)
        source = _relocated(start + jnp.arange(block, dtype=jnp.int32), from_Q, to_Q)
        return lax.dynamic_update_slice_in_dim(done_RM, _rows(array_XM, source), start, 0)

    empty_RM = lax.empty((exchange.buffer_rows, *array_XM.shape[1:]), array_XM.dtype)
    return lax.fori_loop(0, (num_rows + block - 1) // block, one_block, empty_RM)


def _relocated(index_I: jax.Array, from_Q: jax.Array, to_Q: jax.Array) -> jax.Array:
    """The new index of each index, if the range that starts at ``from_Q`` is moved to ``to_Q``.

    ``from_Q`` is ascending. Of ranges with the same start all but the last are empty.

    >>> _relocated(jnp.arange(6), jnp.asarray([0, 2, 2]), jnp.asarray([7, 0, 3])).tolist()
    [7, 8, 3, 4, 5, 6]
    """
    shift_Q = to_Q - from_Q
    step_Q = jnp.diff(shift_Q, prepend=0)
    return index_I + jnp.sum(jnp.where(index_I[:, None] >= from_Q[None], step_Q[None], 0), axis=1, dtype=jnp.int32)


def _offsets(sizes: jax.Array) -> jax.Array:
    """The exclusive cumulative sum along the last dim."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _rows(array_XM: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index; an index out of bounds gives the nearest row."""
    return array_XM.at[index].get(mode="clip")

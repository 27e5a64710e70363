"""The all-to-all of rows to their experts: each row is received, sorted by expert, and returns to its place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardwright.core.plan.movement import ReshardStep
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_jax.experts.exchange import (
    Exchange,
    _from_experts_in_chunks,
    _from_experts_ragged,
    _to_experts_in_chunks,
    _to_experts_ragged,
    from_experts,
    gathered,
    reduce_scattered,
    routes_of,
    to_experts,
)
from shardwright.engine_jax.io.layer_io import TokenRing
from tests.precision.oracle import quantized

ROWS, EMBED, EXPERTS = 12, 3, 8
MESH = jax.make_mesh((2, 2, 2), ("fsdp", "context", "expert"), axis_types=(AxisType.Auto,) * 3)
ALL = PartitionSpec(MESH.axis_names)
GROUPS = {
    ("expert",): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("context", "expert"): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("expert", "context"): [[0, 2, 1, 3], [4, 6, 5, 7]],
    ("fsdp", "expert"): [[0, 1, 4, 5], [2, 3, 6, 7]],
}
"""The devices of each group, major axis first."""


def on_devices(function, num_in: int):
    return jax.shard_map(function, mesh=MESH, in_specs=(ALL,) * num_in, out_specs=ALL, check_vma=False)


def rows_by_expert(seed: int) -> np.ndarray:
    """How many rows of each device go to each expert. The numbers are uneven, and one device has no rows."""
    rng = np.random.default_rng(seed)
    counts = np.stack([rng.multinomial(rng.integers(0, ROWS + 1), rng.dirichlet([0.7] * EXPERTS)) for _ in range(8)])
    counts[3] = 0
    return counts.astype(np.int32)


def by_hand(counts: np.ndarray, rows_DNM: np.ndarray, group: list[int], buffer_rows: int):
    """What each device of a group receives, in order, and which of its own rows each device keeps."""
    each = EXPERTS // len(group)
    received = {device: [] for device in group}
    origin = {device: [] for device in group}
    for number, device in enumerate(group):
        for expert in range(number * each, (number + 1) * each):
            for source in group:
                first = counts[source, :expert].sum()
                for row in range(first, first + counts[source, expert]):
                    received[device].append((expert, rows_DNM[source, row]))
                    origin[device].append((source, row))
    overflow = dict.fromkeys(group, 0)
    for device in group:
        for source, _ in origin[device][buffer_rows:]:
            overflow[source] += 1
        received[device], origin[device] = received[device][:buffer_rows], origin[device][:buffer_rows]
    return received, origin, overflow


@pytest.mark.parametrize("buffer_rows", [48, 5])
@pytest.mark.parametrize("axes", GROUPS, ids=str)
def test_rows_reach_their_experts_and_return(axes: tuple[str, ...], buffer_rows: int) -> None:
    counts = rows_by_expert(seed=len(axes))
    rows_DNM = np.random.default_rng(1).normal(size=(8, ROWS, EMBED)).astype(np.float32)
    exchange = Exchange(axes=axes, rows=ROWS, buffer_rows=buffer_rows, chunk=ROWS)

    def both_exchanges(rows_NM, counts):
        routes = routes_of(counts[0], exchange)
        buffer_RM = to_experts(rows_NM[0], routes, exchange)
        # The added number identifies the place that a row had in the buffer.
        returned_NM = from_experts(buffer_RM + 100.0 * jnp.arange(buffer_rows)[:, None], routes, exchange)
        return buffer_RM[None], returned_NM[None], routes.sizes_E[None], routes.overflow[None]

    buffer_DRM, returned_DNM, sizes_DE, overflow_D = jax.jit(on_devices(both_exchanges, 2))(rows_DNM, counts)
    each = EXPERTS // len(GROUPS[axes][0])
    for group in GROUPS[axes]:
        received, origin, overflow = by_hand(counts, rows_DNM, group, buffer_rows)
        expected_DNM = np.zeros_like(rows_DNM)
        for number, device in enumerate(group):
            experts = [expert - number * each for expert, _ in received[device]]
            np.testing.assert_array_equal(sizes_DE[device], np.bincount(experts, minlength=each))
            for place, (_, row_M) in enumerate(received[device]):
                np.testing.assert_array_equal(buffer_DRM[device, place], row_M)
                source, row = origin[device][place]
                expected_DNM[source, row] = row_M + np.float32(100 * place)
            assert overflow_D[device] == overflow[device]
        np.testing.assert_array_equal(returned_DNM[np.asarray(group)], expected_DNM[group])
    assert (np.sum(overflow_D) > 0) == (buffer_rows == 5)


def test_from_experts_is_the_transpose_of_to_experts() -> None:
    """<to_experts(x), y> = <x, from_experts(y)> over all devices, and each is the other's gradient."""
    axes, buffer_rows = ("context", "expert"), 9
    exchange = Exchange(axes=axes, rows=ROWS, buffer_rows=buffer_rows, chunk=ROWS)
    rng = np.random.default_rng(2)
    rows_DNM = rng.normal(size=(8, ROWS, EMBED)).astype(np.float32)
    cotangent_DRM = rng.normal(size=(8, buffer_rows, EMBED)).astype(np.float32)

    def products(rows_NM, cotangent_RM, counts):
        routes = routes_of(counts[0], exchange)
        arrived_R1 = (jnp.arange(buffer_rows) < jnp.sum(routes.sizes_E))[:, None]
        cotangent_RM = jnp.where(arrived_R1, cotangent_RM[0], 0)
        buffer_RM, pull_dispatched = jax.vjp(lambda x: to_experts(x, routes, exchange), rows_NM[0])
        returned_NM, pull_returned = jax.vjp(lambda x: from_experts(x, routes, exchange), cotangent_RM)
        dispatched = jnp.sum(jnp.where(arrived_R1, buffer_RM, 0) * cotangent_RM)
        returned = jnp.sum(rows_NM[0] * returned_NM)
        same_returned = jnp.array_equal(pull_dispatched(cotangent_RM)[0], returned_NM)
        same_dispatched = jnp.array_equal(
            jnp.where(arrived_R1, pull_returned(rows_NM[0])[0] - buffer_RM, 0), jnp.zeros_like(buffer_RM)
        )
        return dispatched[None], returned[None], same_returned[None], same_dispatched[None]

    dispatched, returned, same_returned, same_dispatched = jax.jit(on_devices(products, 3))(
        rows_DNM, cotangent_DRM, rows_by_expert(5)
    )
    np.testing.assert_allclose(np.sum(dispatched), np.sum(returned), rtol=1e-5)
    assert np.all(same_returned)
    assert np.all(same_dispatched)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """``lax.ragged_all_to_all`` as documented, by an all-gather of everything, because this backend does not have it.

    The result is NaN if sender and receiver disagree on a size, or if rows are out of bounds.
    """
    rows, begins, sizes, places = (
        jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, number = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for source in range(rows.shape[0]):
        begin, size, place = begins[source, me], sizes[source, me], places[source, me]
        comes = (number >= place) & (number < place + size)
        outside = (begin + size > operand.shape[0]) | (place + size > output.shape[0]) | (size != recv_sizes[source])
        received = jnp.where(outside, jnp.nan, rows[source][jnp.clip(begin + number - place, 0, operand.shape[0] - 1)])
        output = jnp.where(comes[:, None], received, output)
    return output


@pytest.mark.parametrize("buffer_rows", [48, 5])
@pytest.mark.parametrize("axes", GROUPS, ids=str)
def test_ragged_or_in_chunks_the_rows_are_the_same(axes, buffer_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    exchange = Exchange(axes=axes, rows=ROWS, buffer_rows=buffer_rows, chunk=ROWS)
    rows_DNM = np.random.default_rng(6).normal(size=(8, ROWS, EMBED)).astype(np.float32)

    def both(rows_NM, counts):
        routes = routes_of(counts[0], exchange)
        arrived_R1 = (jnp.arange(buffer_rows) < jnp.sum(routes.sizes_E))[:, None]
        ragged_RM, chunks_RM = (
            dispatch(rows_NM[0], routes, exchange=exchange) for dispatch in (_to_experts_ragged, _to_experts_in_chunks)
        )
        returned = (
            combine(chunks_RM, routes, exchange=exchange)[None]
            for combine in (_from_experts_ragged, _from_experts_in_chunks)
        )
        return tuple(jnp.where(arrived_R1, buffer, 0)[None] for buffer in (ragged_RM, chunks_RM)), tuple(returned)

    (ragged, chunks), (returned_ragged, returned_in_chunks) = jax.jit(on_devices(both, 2))(
        rows_DNM, rows_by_expert(len(axes))
    )
    assert np.any(chunks)
    np.testing.assert_array_equal(ragged, chunks)
    np.testing.assert_array_equal(returned_ragged, returned_in_chunks)


@pytest.mark.parametrize("name", ["mxfp8", "fp8-block"])
def test_what_is_sent_as_codes_arrives_as_their_values_and_cotangents_as_they_are(name: str) -> None:
    """By the quantizer of NumPy and ml_dtypes, row by row; of each direction the other one's cotangents are sent as codes."""
    quantizer = preset(name).quantizers["output", "input"]
    exchange = Exchange(axes=("expert",), rows=ROWS, buffer_rows=24, chunk=ROWS)
    rng = np.random.default_rng(7)
    rows_DNM = (rng.normal(size=(8, ROWS, 160)) * 2.0 ** rng.integers(-12, 12, size=(8, ROWS, 1))).astype(np.float32)
    values_DNM = np.stack([values_by_rows(rows_NM, quantizer) for rows_NM in rows_DNM])

    def exchanged(rows_NM, values_NM, counts):
        routes = routes_of(counts[0], exchange)
        coded, back = jax.vjp(lambda x: to_experts(x, routes, exchange, quantizer), rows_NM[0])
        plain, plain_back = jax.vjp(lambda x: to_experts(x, routes, exchange), values_NM[0])
        _, of_codes = jax.vjp(lambda y: from_experts(y, routes, exchange, quantizer), plain)
        _, of_values = jax.vjp(lambda y: from_experts(y, routes, exchange), plain)
        return tuple(
            one[None]
            for one in (coded, plain, *back(coded), *plain_back(coded), *of_codes(rows_NM[0]), *of_values(values_NM[0]))
        )

    found = jax.jit(on_devices(exchanged, 3))(rows_DNM, values_DNM, rows_by_expert(2))
    for coded, plain in zip(found[::2], found[1::2], strict=True):
        assert np.any(coded)
        np.testing.assert_array_equal(coded, plain)


def values_by_rows(rows_NM: np.ndarray, quantizer: Quantizer) -> np.ndarray:
    found = []
    for row_M in rows_NM:
        codes, scales, _ = quantized(row_M[None], quantizer)
        width = quantizer.block.contracted or row_M.shape[0]
        if quantizer.scale.dtype == "float8_e8m0fnu":
            scales = 2.0 ** (scales - 127)
        of_each = np.repeat(scales, width, axis=1)[:, : row_M.shape[0]]
        found.append((codes.view(quantizer.dtype).astype(np.float32) * of_each)[0])
    return np.stack(found).astype(np.float32)


def test_gather_and_reduce_scatter_are_each_others_gradient() -> None:
    axes = ("expert", "context")
    x = np.random.default_rng(4).normal(size=(8, 2, EMBED)).astype(np.float32)

    ring = TokenRing(
        gather=ReshardStep(kind="all-gather", axes=axes), scatter=ReshardStep(kind="reduce-scatter", axes=axes)
    )

    def both(x):
        full, pull = jax.vjp(partial(gathered, ring=ring), x[0])
        mine = full * (1.0 + jax.lax.axis_index(axes))
        (d_x,) = pull(mine)
        shard, pull_shard = jax.vjp(partial(reduce_scattered, ring=ring), mine)
        return full[None], d_x[None], shard[None], pull_shard(shard)[0][None]

    full, d_x, shard, d_shard = jax.jit(on_devices(both, 1))(x)
    for group in GROUPS[axes]:
        expected = x[group].reshape(-1, EMBED)
        for device in group:
            np.testing.assert_array_equal(full[device], expected)
            np.testing.assert_allclose(d_x[device], 10 * x[device], rtol=1e-5)
            np.testing.assert_array_equal(d_x[device], shard[device])
            np.testing.assert_array_equal(d_shard[device], np.asarray(shard)[group].reshape(-1, EMBED))


@pytest.mark.parametrize(
    ("platform", "has"), [("cpu", "all_to_all"), ("tpu", "ragged_all_to_all"), ("cuda", "ragged_all_to_all")]
)
def test_each_backend_has_its_own_all_to_all(platform: str, has: str) -> None:
    """Lowered on this machine for every platform."""
    exchange = Exchange(axes=("expert",), rows=ROWS, buffer_rows=24, chunk=ROWS)

    def cotangent(rows_NM, counts):
        routes = routes_of(counts[0], exchange)
        return jax.grad(lambda x: jnp.sum(from_experts(to_experts(x, routes, exchange) ** 2, routes, exchange)))(
            rows_NM[0]
        )[None]

    rows, counts = np.zeros((8, ROWS, EMBED), np.float32), rows_by_expert(1)
    text = jax.jit(on_devices(cotangent, 2)).trace(rows, counts).lower(lowering_platforms=(platform,)).as_text()
    others = {"all_to_all": "@ragged_all_to_all", "ragged_all_to_all": '"stablehlo.all_to_all"'}
    wanted = {"all_to_all": '"stablehlo.all_to_all"', "ragged_all_to_all": "@ragged_all_to_all"}
    # Both directions, and both again for the gradient, except the last one, which nothing needs.
    assert text.count(wanted[has]) in (3, 4)
    assert others[has] not in text


def test_copies_beside_an_exchange_are_of_blocks_not_of_the_buffer() -> None:
    """A buffer for the worst case is several times what is received: no gather of the program makes all of it."""
    exchange = Exchange(axes=("expert",), rows=ROWS, buffer_rows=4 * ROWS, chunk=ROWS)

    def there_and_back(rows_NM, counts):
        routes = routes_of(counts[0], exchange)
        return from_experts(to_experts(rows_NM[0], routes, exchange), routes, exchange)[None]

    rows, counts = np.zeros((8, ROWS, EMBED), np.float32), rows_by_expert(1)
    text = jax.jit(on_devices(there_and_back, 2)).trace(rows, counts).lower(lowering_platforms=("cuda",)).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert gathers
    assert not any(f"-> tensor<{4 * ROWS}x{EMBED}xf32>" in line for line in gathers)

"""Attention a block at a time: the numbers of plain softmax, whatever a row's documents, lengths, order and heads.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.engine_jax.attention.blockwise import attend_in_blocks, with_keys_in_blocks
from shardwright.engine_jax.attention.scores import AttentionMask, attend, with_keys
from tests.engine_jax.seeing import Attend, Shape, far, made, plainly, with_slopes

SCALE, BLOCK = 0.3, 16
GROUPED = Shape(rows=2, keys=64, heads=4, kv_heads=2, width=8, value_width=8)
LATENT = Shape(rows=1, keys=48, heads=3, kv_heads=3, width=12, value_width=8)
SHAPES = {
    "grouped": GROUPED,
    "latent": LATENT,
    "one KV head": replace(GROUPED, kv_heads=1),
    "odd length": replace(GROUPED, keys=59),
    "a token more than a block": replace(LATENT, keys=17),
    "a piece of a row as queries": replace(GROUPED, places=tuple(range(32, 48))),
    "an odd piece": replace(GROUPED, keys=61, places=tuple(range(9, 46))),
    "head and tail": replace(LATENT, places=(*range(8), *range(40, 48))),
}


def in_blocks(block: int = BLOCK) -> Attend:
    return partial(attend_in_blocks, block=block)


def piece_by_piece(pieces: int, block: int = BLOCK) -> Attend:
    """Keys that come in pieces, as around a ring."""

    def attend(q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask, scale: float) -> jax.Array:
        running = None
        for part in np.array_split(np.arange(k_BSKD.shape[1]), pieces):
            seen = mask._replace(
                kv_positions_BS=mask.kv_positions_BS[:, part], kv_segments_BS=mask.kv_segments_BS[:, part]
            )
            running = with_keys_in_blocks(running, q_BTHD, k_BSKD[:, part], v_BSKE[:, part], seen, scale, block)
        assert running is not None
        out_BKGTE = running.sum_BKGTE / running.weight_BKGT[..., None]
        return jnp.moveaxis(out_BKGTE, 3, 1).reshape(*q_BTHD.shape[:3], -1).astype(q_BTHD.dtype)

    return attend


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_plain_softmax(shape: Shape, shuffled: bool) -> None:
    case = made(shape, shuffled=shuffled)
    expected = plainly(case, SCALE)
    assert far(with_slopes(in_blocks(), case, SCALE), expected) < 1e-6
    assert far(with_slopes(piece_by_piece(2), case, SCALE), expected) < 1e-6


@pytest.mark.parametrize("shape", [GROUPED, replace(GROUPED, keys=59), LATENT], ids=["grouped", "odd", "latent"])
def test_a_query_that_sees_no_key_takes_the_mean_of_all_values(shape: Shape) -> None:
    case = made(shape)
    segments_BT = case.mask.segments_BT.at[0, :20].set(77).at[-1, 41].set(77)
    case = case._replace(mask=case.mask._replace(segments_BT=segments_BT))
    expected = plainly(case, SCALE)
    for way in (in_blocks(), piece_by_piece(2), attend):
        out, cotangents = with_slopes(way, case, SCALE)
        assert far((out, cotangents), expected) < 1e-6
        assert np.abs(np.asarray(cotangents[0])[0, :20]).max() == 0


@pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_in_bfloat16_it_is_as_near_as_all_scores_at_once(shape: Shape) -> None:
    case = made(replace(shape, dtype="bfloat16", keys=4 * shape.keys), num_documents=2)
    exact = plainly(case, SCALE)
    whole = far(with_slopes(attend, case, SCALE), exact)
    for way in (in_blocks(), piece_by_piece(4)):
        out, cotangents = with_slopes(way, case, SCALE)
        assert out.dtype == jnp.bfloat16
        assert {cotangent.dtype for cotangent in cotangents} == {jnp.dtype("bfloat16")}
        assert far((out, cotangents), exact) < max(1.2 * whole, 0.005)


@pytest.mark.parametrize("way", [in_blocks(), piece_by_piece(2)], ids=["one row", "pieces"])
def test_blocks_that_nobody_sees_are_passed_over(way: Attend) -> None:
    """What they hold is never touched: it may be no number, which a product with zero would not be either."""
    shape = replace(GROUPED, rows=1, places=tuple(range(16, 32)))
    case = made(shape, num_documents=1)
    expected = with_slopes(way, case, SCALE)
    unseen_S = np.arange(64) >= 32
    k_BSKD, v_BSKE = (jnp.where(unseen_S[None, :, None, None], jnp.nan, array) for array in (case[1], case[2]))
    out, cotangents = with_slopes(way, case._replace(k_BSKD=k_BSKD, v_BSKE=v_BSKE), SCALE)
    jax.tree.map(np.testing.assert_array_equal, (out, cotangents), expected)
    assert np.isnan(np.asarray(attend(case.q_BTHD, k_BSKD, v_BSKE, case.mask, SCALE))).any()


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", [in_blocks(128), piece_by_piece(2, 128)], ids=["one row", "pieces"])
def test_no_pass_holds_a_score_for_every_pair(way: Attend, remat: bool) -> None:
    """In a loop over layers, where what all of them have in common (what is seen of what) would be made before it."""
    shape = Shape(rows=1, keys=2048, heads=8, kv_heads=2, width=16, value_width=16)
    case = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), made(shape))

    def layer(x_BTHD: jax.Array, mask: AttentionMask) -> jax.Array:
        return x_BTHD + way(x_BTHD, x_BTHD[:, :, :2], x_BTHD[:, :, 2:4], mask, SCALE)

    def loss(x_BTHD: jax.Array, mask: AttentionMask) -> jax.Array:
        one = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.sum(jax.lax.scan(lambda x_BTHD, _: (one(x_BTHD, mask), None), x_BTHD, length=3)[0])

    program = jax.jit(jax.grad(loss)).lower(case.q_BTHD, case.mask).compile()
    memory = program.memory_analysis()
    assert memory is not None
    scores = shape.heads * shape.keys**2 * 4
    assert memory.temp_size_in_bytes < scores / 4


def test_a_running_softmax_may_go_on_either_way() -> None:
    """With all scores of a piece at once, or a block at a time: one running softmax."""
    case = made(GROUPED)
    ours = theirs = None
    for part in (slice(0, 32), slice(32, 64)):
        k_BSKD, v_BSKE, (positions_BT, segments_BT, *_) = case.k_BSKD[:, part], case.v_BSKE[:, part], case.mask
        seen = AttentionMask(positions_BT, segments_BT, positions_BT[:, part], segments_BT[:, part])
        ours = with_keys_in_blocks(ours, case.q_BTHD, k_BSKD, v_BSKE, seen, SCALE, BLOCK)
        theirs = with_keys(theirs, case.q_BTHD, k_BSKD, v_BSKE, seen, SCALE)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs)

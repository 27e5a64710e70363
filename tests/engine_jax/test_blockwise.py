"""Blockwise attention equals plain softmax attention for any documents, lengths, order and heads of a row.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.engine_jax.attention.blockwise import accumulate_attention_in_blocks, attend_in_blocks
from shardwright.engine_jax.attention.scores import AttentionMask, accumulate_attention, attend
from tests.engine_jax.attention_cases import Attend, Shape, far, made, reference_attention, with_cotangents
from tests.matrix import rest, some

SCALE, BLOCK = 0.3, 16
GROUPED = Shape(rows=2, keys=64, heads=4, kv_heads=2, width=8, value_width=8)
LATENT = Shape(rows=1, keys=48, heads=3, kv_heads=3, width=12, value_width=8)
SHAPES = {
    "grouped": GROUPED,
    "latent": LATENT,
    "one KV head": replace(GROUPED, kv_heads=1),
    "odd length": replace(GROUPED, keys=59),
    "a token more than a block": replace(LATENT, keys=17),
    "queries from the middle of a row": replace(GROUPED, places=tuple(range(32, 48))),
    "an odd number of queries": replace(GROUPED, keys=61, places=tuple(range(9, 46))),
    "head and tail": replace(LATENT, places=(*range(8), *range(40, 48))),
}


@cache
def in_blocks(block: int = BLOCK) -> Attend:
    return partial(attend_in_blocks, block=block)


@cache
def shard_by_shard(shards: int, block: int = BLOCK) -> Attend:
    """One shard of the keys after the other, as in ring attention."""

    def attend(q_BTHD, k_BSKD, v_BSKE, mask: AttentionMask, scale: float) -> jax.Array:
        softmax = None
        for shard in np.array_split(np.arange(k_BSKD.shape[1]), shards):
            visible = mask._replace(
                kv_positions_BS=mask.kv_positions_BS[:, shard], kv_segments_BS=mask.kv_segments_BS[:, shard]
            )
            softmax = accumulate_attention_in_blocks(
                softmax, q_BTHD, k_BSKD[:, shard], v_BSKE[:, shard], visible, scale, block
            )
        assert softmax is not None
        out_BKGTE = softmax.sum_BKGTE / softmax.normalizer_BKGT[..., None]
        return jnp.moveaxis(out_BKGTE, 3, 1).reshape(*q_BTHD.shape[:3], -1).astype(q_BTHD.dtype)

    return attend


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("shape", some(list(SHAPES.values()), (1, 2, 3, 6, 7)), ids=SHAPES)
def test_it_is_plain_softmax(shape: Shape, shuffled: bool) -> None:
    case = made(shape, shuffled=shuffled)
    expected = reference_attention(case, SCALE)
    assert far(with_cotangents(in_blocks(), case, SCALE), expected) < 1e-6
    assert far(with_cotangents(shard_by_shard(2), case, SCALE), expected) < 1e-6


@pytest.mark.parametrize("shape", [GROUPED, replace(GROUPED, keys=59), LATENT], ids=["grouped", "odd", "latent"])
def test_the_output_of_a_fully_masked_query_is_the_mean_of_all_values(shape: Shape) -> None:
    case = made(shape)
    segments_BT = case.mask.segments_BT.at[0, :20].set(77).at[-1, 41].set(77)
    case = case._replace(mask=case.mask._replace(segments_BT=segments_BT))
    expected = reference_attention(case, SCALE)
    for attend_by in (in_blocks(), shard_by_shard(2), attend):
        out, cotangents = with_cotangents(attend_by, case, SCALE)
        assert far((out, cotangents), expected) < 1e-6
        assert np.abs(np.asarray(cotangents[0])[0, :20]).max() == 0


@pytest.mark.parametrize("shape", [GROUPED, rest(LATENT)], ids=["grouped", "latent"])
def test_in_bfloat16_it_is_as_close_as_all_scores_at_once(shape: Shape) -> None:
    case = made(replace(shape, dtype="bfloat16", keys=4 * shape.keys), num_documents=2)
    exact = reference_attention(case, SCALE)
    whole = far(with_cotangents(attend, case, SCALE), exact)
    for attend_by in (in_blocks(), shard_by_shard(4)):
        out, cotangents = with_cotangents(attend_by, case, SCALE)
        assert out.dtype == jnp.bfloat16
        assert {cotangent.dtype for cotangent in cotangents} == {jnp.dtype("bfloat16")}
        assert far((out, cotangents), exact) < max(1.2 * whole, 0.005)


@pytest.mark.parametrize("attend_by", [in_blocks(), shard_by_shard(2)], ids=["one row", "shards"])
def test_fully_masked_blocks_are_skipped(attend_by: Attend) -> None:
    """Their keys are never read: they may be NaN, and NaN times zero would be NaN."""
    shape = replace(GROUPED, rows=1, places=tuple(range(16, 32)))
    case = made(shape, num_documents=1)
    expected = with_cotangents(attend_by, case, SCALE)
    masked_S = np.arange(64) >= 32
    k_BSKD, v_BSKE = (jnp.where(masked_S[None, :, None, None], jnp.nan, array) for array in (case[1], case[2]))
    out, cotangents = with_cotangents(attend_by, case._replace(k_BSKD=k_BSKD, v_BSKE=v_BSKE), SCALE)
    jax.tree.map(np.testing.assert_array_equal, (out, cotangents), expected)
    assert np.isnan(np.asarray(attend(case.q_BTHD, k_BSKD, v_BSKE, case.mask, SCALE))).any()


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("attend_by", [in_blocks(128), shard_by_shard(2, 128)], ids=["one row", "shards"])
def test_no_pass_holds_a_score_for_every_pair(attend_by: Attend, remat: bool) -> None:
    """In a loop over layers, before which JAX would otherwise compute what all layers share: the masks of all blocks."""
    shape = Shape(rows=1, keys=2048, heads=8, kv_heads=2, width=16, value_width=16)
    case = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), made(shape))

    def layer(x_BTHD: jax.Array, mask: AttentionMask) -> jax.Array:
        return x_BTHD + attend_by(x_BTHD, x_BTHD[:, :, :2], x_BTHD[:, :, 2:4], mask, SCALE)

    def loss(x_BTHD: jax.Array, mask: AttentionMask) -> jax.Array:
        one = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.sum(jax.lax.scan(lambda x_BTHD, _: (one(x_BTHD, mask), None), x_BTHD, length=3)[0])

    program = jax.jit(jax.grad(loss)).lower(case.q_BTHD, case.mask).compile()
    memory = program.memory_analysis()
    assert memory is not None
    scores = shape.heads * shape.keys**2 * 4
    assert memory.temp_size_in_bytes < scores / 4


def test_both_online_softmaxes_have_the_same_state() -> None:
    """With all scores of a shard at once, or a block at a time."""
    case = made(GROUPED)
    ours = theirs = None
    for shard in (slice(0, 32), slice(32, 64)):
        k_BSKD, v_BSKE, (positions_BT, segments_BT, *_) = case.k_BSKD[:, shard], case.v_BSKE[:, shard], case.mask
        visible = AttentionMask(positions_BT, segments_BT, positions_BT[:, shard], segments_BT[:, shard])
        ours = accumulate_attention_in_blocks(ours, case.q_BTHD, k_BSKD, v_BSKE, visible, SCALE, BLOCK)
        theirs = accumulate_attention(theirs, case.q_BTHD, k_BSKD, v_BSKE, visible, SCALE)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs)

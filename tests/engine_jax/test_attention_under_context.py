"""Context parallelism by all-gather, ring or all-to-all (Ulysses): always the attention of one device.

Rows hold several documents and padding. There are fewer KV heads than heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardwright.core.mesh.mesh import Mesh as CoreMesh
from shardwright.data.packing import reordered
from shardwright.engine_jax.attention.ring import ring_attention
from shardwright.engine_jax.attention.scores import AttentionMask, attend
from shardwright.engine_jax.io.layer_io import Ring
from tests.engine_jax.attention_layer import Case, batch, on_one_device, plan_of, program_of, table_of, weights_of
from tests.engine_jax.program import Program

LAYOUT = """name: mine
mesh: {{{mesh}}}
roles: {{{roles}}}
move: {{attention: {move}}}
rules: {{{rules}}}
"""
MOVES = ("gather", "ring", "ulysses")
WITH_ROWS = {"mesh": "fsdp: 2, context: 4", "roles": "fsdp: fsdp, context: context"}
WITH_HEADS = {"mesh": "context: 2, tensor: 2", "roles": "context: context, tensor: tensor"}
WITH_PARALLEL_SEQUENCE = {
    "mesh": "context: 2, tensor: 4",
    "roles": "context: context, tensor: {elsewhere: tensor, sequence_parallel: true}",
}
OUT_OF_MESH_ORDER = {
    "mesh": "expert: 2, fsdp: 2, context: 2",
    "roles": "expert: {elsewhere: context, mlp: tensor}, fsdp: fsdp, context: context",
}
"""The first axis does not shard the length in the MLP, so that it is the minor axis of a row."""
UNSHARDED_KV_HEADS = "attention: {kv_heads: []}"


def case_of(where: Mapping[str, str], model: str, move: str, *, rules: str = "", balanced: bool = False) -> Case:
    return Case(model=model, layout=LAYOUT.format(**where, move=move, rules=rules), balanced=balanced)


def close(ours, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, expected)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("model", ["grouped", "latent"])
@pytest.mark.parametrize("where", [WITH_ROWS, WITH_HEADS, OUT_OF_MESH_ORDER], ids=["rows", "heads", "two axes"])
def test_it_is_the_attention_of_one_device(where: dict[str, str], model: str, move: str) -> None:
    case = case_of(where, model, move)
    close(program_of(case)(weights_of(model), batch()), on_one_device(model))


@pytest.mark.parametrize("move", MOVES)
def test_kv_heads_may_be_fewer_than_the_devices_that_share_the_heads(move: str) -> None:
    """Each of 4 devices has 2 of 8 heads, and takes their KV head from the 2 that every device holds."""
    case = case_of(WITH_PARALLEL_SEQUENCE, "few KV heads", move, rules=UNSHARDED_KV_HEADS)
    assert str(plan_of(case).by_name["attention.keys_attended"].in_use) == "batch kv_length kv_heads head_dim"
    close(program_of(case)(weights_of(case.model), batch()), on_one_device(case.model))


def test_a_device_takes_its_heads_of_weights_that_a_rule_leaves_unsharded() -> None:
    case = case_of(WITH_HEADS, "grouped", "ring", rules="attention: {heads: []}")
    rows = plan_of(case).by_name
    assert str(rows["layers.attention.q"].in_use) == "embed heads head_dim"
    assert rows["layers.attention.q"].gradient == {"context": "all-reduce", "tensor": "all-reduce"}
    close(program_of(case)(weights_of(case.model), batch()), on_one_device(case.model))


def test_a_device_may_attend_to_several_kv_heads() -> None:
    """Each of 3 KV heads has 2 of 6 heads: each of 2 devices has both heads of one KV head, and one of the middle KV head."""
    case = case_of(WITH_HEADS, "uneven KV heads", "ring", rules=UNSHARDED_KV_HEADS)
    close(program_of(case)(weights_of(case.model), batch()), on_one_device(case.model))


@pytest.mark.parametrize("move", ["gather", "ring"])
@pytest.mark.parametrize("model", ["grouped", "latent"])
def test_balanced_rows_need_no_reordering(model: str, move: str) -> None:
    case = case_of(WITH_ROWS, model, move, balanced=True)
    chunks = plan_of(case).row_chunks
    assert chunks == (0, 7, 1, 6, 2, 5, 3, 4)
    added, (of_stream, of_weights) = program_of(case)(weights_of(model), balanced(chunks, batch()))
    expected, (of_expected_stream, of_expected_weights) = on_one_device(model)
    along_rows = balanced(chunks, {"added": expected, "stream": of_expected_stream})
    close((added, of_stream, of_weights), (along_rows["added"], along_rows["stream"], of_expected_weights))


@pytest.mark.parametrize("left", ["positions", "segments"])
def test_positions_and_segments_in_another_order_change_the_result(left: str) -> None:
    """The tests above would detect a loader that reorders only the tokens."""
    case = case_of(WITH_ROWS, "grouped", "ring", balanced=True)
    chunks = plan_of(case).row_chunks
    arrays = {**balanced(chunks, batch()), left: batch()[left]}
    added, _ = program_of(case)(weights_of(case.model), arrays)
    expected = balanced(chunks, {"added": on_one_device(case.model)[0]})["added"]
    assert np.linalg.norm(np.asarray(added) - expected) > 0.01 * np.linalg.norm(expected)


def balanced(chunks: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows in the order of the pieces, tokens along dim 1."""
    tokens_last = {name: np.moveaxis(array, 1, -1) for name, array in arrays.items()}
    return {name: np.moveaxis(array, -1, 1) for name, array in reordered(tokens_last, chunks).items()}


@pytest.mark.parametrize(("model", "permuted_shapes"), [("grouped", [(1, 8, 4, 8)] * 2), ("latent", [(1, 8, 20)])])
def test_the_ring_permutes_shards_and_gathers_nothing(model: str, permuted_shapes: list[tuple[int, ...]]) -> None:
    """cp - 1 times forward and backward: a device's shard of keys and values, or of the latent."""
    found = moved(case_of(WITH_ROWS, model, "ring"))
    permuted = [shape for kind, shape in found if kind == "permute"]
    assert sorted(permuted) == sorted(permuted_shapes * 2 * 3)
    assert [kind for kind, shape in found if shape[:2] == (1, 32)] == []


@pytest.mark.parametrize(("model", "gathered"), [("grouped", [(1, 32, 4, 8)] * 2), ("latent", [(1, 32, 20)])])
def test_keys_and_values_or_the_latent_are_gathered(model: str, gathered: list[tuple[int, ...]]) -> None:
    """The keys and values from the latent are never gathered; in DeepSeek-V3 they have 71 times as many elements."""
    found = moved(case_of(WITH_ROWS, model, "gather"))
    assert sorted(shape for kind, shape in found if kind == "all-gather" and len(shape) > 2) == sorted(gathered)
    assert [kind for kind, _ in found if kind in ("permute", "all-to-all")] == []


def moved(case: Case) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and shape of the collectives of float32 activations in a compiled case, forward and backward."""
    text = program_of(case).lower(weights_of(case.model), batch()).compile().as_text()
    of_weights = {tuple(shape) for shape in _parts(case)}
    found = [one for one in Program(text).collectives(plan_of(case).mesh) for _ in range(one.num_ops)]
    floats = [one for one in found if one.dtypes == ("float32",)]
    return [(one.kind, one.shape) for one in floats if one.shape not in of_weights]


def _parts(case: Case) -> list[tuple[int, ...]]:
    """Every shape that a weight has, at rest or in use."""
    return [weight.shape for weight in table_of(case.model).weights]


def test_a_fully_masked_query_has_the_output_of_one_device() -> None:
    rng = np.random.default_rng(1)
    q_BTHD, k_BSKD, v_BSKE = (rng.normal(size=(2, 16, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    positions_BT = np.tile(np.arange(16), (2, 1))
    # Queries of a document that no key has: all queries of row 0's first shard, and a few tokens of row 1.
    segments_BT = np.ones((2, 16), np.int32)
    segments_BT[0, :4] = segments_BT[1, 6:9] = 7
    mask = AttentionMask(positions_BT, segments_BT, positions_BT, np.ones((2, 16), np.int32))
    mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
    by_tokens, replicated, ring = (
        PartitionSpec(None, "context"),
        PartitionSpec(),
        Ring.over(CoreMesh.of(context=4), ("context",)),
    )

    def around(q_BTHD, k_BSKD, v_BSKE, mask):
        def loss(q_BTHD, k_BSKD, v_BSKE):
            out = ring_attention(q_BTHD, (k_BSKD, v_BSKE), ("keys", "values"), lambda held, _: held, mask, 0.5, ring)
            return jnp.sum(jnp.sin(out)), out

        (_, out), cotangents = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q_BTHD, k_BSKD, v_BSKE)
        return out, cotangents

    def alone(q_BTHD, k_BSKD, v_BSKE, mask):
        out, cotangent = jax.vjp(lambda *qkv: attend(*qkv, mask, 0.5), q_BTHD, k_BSKD, v_BSKE)
        return out, cotangent(jnp.cos(out))

    specs = (by_tokens, by_tokens, by_tokens, AttentionMask(by_tokens, by_tokens, replicated, replicated))
    program = jax.shard_map(around, mesh=mesh, in_specs=specs, out_specs=(by_tokens, (by_tokens,) * 3), check_vma=False)
    ours = jax.jit(program)(q_BTHD, k_BSKD, v_BSKE, mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours))
    assert np.abs(ours[1][0][0, :4]).max() == 0
    close(ours, alone(q_BTHD, k_BSKD, v_BSKE, mask))


@pytest.mark.parametrize("model", ["grouped", "latent"])
def test_in_bfloat16_a_ring_is_as_close_as_a_gather(model: str) -> None:
    """Scores, probabilities and sums are in float32: the error is that of the arrays' rounding, not of the number of shards."""
    far = {}
    exact, _ = on_one_device(model)
    for move in ("gather", "ring"):
        case = Case(model=model, layout=LAYOUT.format(**WITH_ROWS, move=move, rules=""), dtype="bfloat16")
        added, _ = program_of(case)(weights_of(model), batch())
        far[move] = np.linalg.norm(np.asarray(added, np.float32) - exact) / np.linalg.norm(exact)
    assert far["ring"] < max(1.2 * far["gather"], 0.005)

"""Memory at the peak of a step, added up by hand for models small enough to do so."""

from __future__ import annotations

from shardwright import make_plan
from shardwright.core.resolution.request import Request
from shardwright.cost import read_machine
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.core.test_collectives import BATCH, LENGTH, plan_of

EMBED, WIDTH, VOCAB, LAYERS = 256, 768, 2048, 6
STREAM = BATCH // 2 * LENGTH * EMBED * 4
"""One activation as wide as the residual stream, on one of two devices, float32."""
KEPT = LAYERS * STREAM
# In a layer: stream, input, q, k, v, attended, projected; input, projected and three widths of hidden units in mlp; and
# positions and segments of queries and keys, before and after their move to attention.
WORKING = 2 * (12 * STREAM + 6 * BATCH // 2 * LENGTH * 4)
# Gathered weights and their gradients; the norms have the same spec at rest and in use.
WEIGHTS = 2 * 4 * (4 * EMBED * EMBED + 3 * EMBED * WIDTH) + 2 * 4 * EMBED


def test_the_peak_is_in_a_layer_where_the_vocabulary_is_small() -> None:
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}).memory
    assert memory.activations_bytes == KEPT + WORKING + WEIGHTS
    assert memory.gradients_bytes == memory.weights_bytes
    assert memory.optimizer_bytes == 2 * memory.weights_bytes


def test_microbatches_hold_fewer_activations_and_the_accumulated_gradients() -> None:
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}, microbatches=4).memory
    assert memory.activations_bytes == (KEPT + WORKING) // 4 + WEIGHTS + memory.gradients_bytes


def test_the_peak_is_at_the_logits_where_the_vocabulary_is_large() -> None:
    plan = plan_of("llama3-1b", "fsdp", {"fsdp": 8}, dtype="bfloat16", weights_dtype="bfloat16")
    vocab, embed, layers, tokens = 128256, 2048, 16, BATCH // 8 * LENGTH
    scores = tokens * vocab * (4 + 2 * 2)
    kernel = 2 * vocab * embed * 2
    kept = layers * tokens * embed * 2
    # No gradient of a layer exists yet: the memory counted for gradients is free for some of it.
    assert plan.memory.activations_bytes == kept + scores + kernel - plan.memory.gradients_bytes > 0


def test_a_tpu_holds_the_gradients_of_one_component_and_one_weight_at_a_time() -> None:
    chip = read_machine("v5p:2x1x1").chip
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}, chip=chip).memory
    # The widest component is attention: input, q, k, v, attended, projected; positions and segments.
    attention = 6 * STREAM + 6 * BATCH // 2 * LENGTH * 4
    gathered = 4 * (4 * EMBED * EMBED + 3 * EMBED * WIDTH) + 2 * 4 * EMBED
    assert memory.activations_bytes == KEPT + WORKING // 2 + attention + gathered + 4 * EMBED * WIDTH


def test_no_two_layers_are_computed_at_one_time() -> None:
    """In a model with expert layers a dense layer counts only where it is the larger."""
    embed = 128

    def needed(mlp: int) -> int:
        table = build("deepseek3-test", {"mlp": mlp})
        read = load_layout("fsdp")
        request = Request(layout=read, table=table, mesh_sizes={"fsdp": 2}, batch=BATCH, length=LENGTH)
        return make_plan(request).memory.activations_bytes

    assert needed(256) == needed(512)
    hidden = 2 * BATCH // 2 * LENGTH * 4
    assert needed(24576) - needed(16384) == 8192 * (hidden + 2 * 3 * embed * 4)


MOVED = """
name: mine
mesh: {{expert: 4}}
move: {{moe: {move}}}
roles: {{expert: {{elsewhere: fsdp, moe: expert}}}}
"""


def test_gradients_of_experts_are_accumulated_in_float32() -> None:
    options = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
    sharded, gathered = (
        plan_of("mixtral-test", MOVED.format(move=m), {}, **options) for m in ("all-to-all", "weights")
    )
    experts = sum(row.bytes_per_device for row in gathered.weights if row.component == "moe")
    buffers = [
        2 * sum(row.bytes_per_device for row in p.activations if row.component == "moe") for p in (sharded, gathered)
    ]
    # Three shards more than at rest: gathered and as gradients in bfloat16, accumulated in float32. And the own shard once
    # more, since it is copied by the gather.
    difference = gathered.memory.activations_bytes - sharded.memory.activations_bytes
    assert difference == experts * (3 * (1 + 1 + 2) + 1) + buffers[1] - buffers[0]


def test_a_pipeline_stage_saves_what_its_own_layers_need() -> None:
    one, three = (plan_of("llama3-test", "pp", {"stage": n, "fsdp": 2}).memory for n in (1, 3))
    assert one.activations_bytes - three.activations_bytes == (6 - 2) * STREAM


def test_every_stage_of_one_program_holds_as_many_layers_as_the_fullest() -> None:
    plan = plan_of("llama3-test", "pp", {"stage": 4, "fsdp": 2})
    layer = 2 * EMBED + (4 * EMBED * EMBED + 3 * EMBED * WIDTH) // 2
    # 8 units over 4 stages: two have two layers. Norms are replicated, and the ends are on every stage.
    assert plan.memory.weights_bytes == 4 * (2 * layer + 2 * VOCAB * EMBED // 2 + EMBED)
    assert plan.memory.gradients_bytes == plan.memory.weights_bytes
    assert not plan.faults

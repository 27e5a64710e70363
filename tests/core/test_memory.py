"""Memory at the peak of a step, added up by hand for models small enough to do so."""

from __future__ import annotations

from math import prod
from typing import Any

from shardwright import make_plan
from shardwright.core.plan.plan import Memory
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
LAST = 4 * VOCAB * EMBED // 2
"""The embedding's gradient, which is counted with the others and is not there before the layers' backward pass has ended."""


def test_the_peak_is_in_a_layer_where_the_vocabulary_is_small() -> None:
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}).memory
    assert memory.activations_bytes == KEPT + WORKING + WEIGHTS - LAST
    assert memory.gradients_bytes == memory.weights_bytes
    assert memory.optimizer_bytes == 2 * memory.weights_bytes


def test_microbatches_hold_fewer_activations_and_the_accumulated_gradients() -> None:
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}, microbatches=4).memory
    assert memory.activations_bytes == (KEPT + WORKING) // 4 + WEIGHTS - LAST + memory.gradients_bytes


def memory_of(layout: str, sizes: dict[str, int], length: int = 8192, **options: object) -> Memory:
    """Of llama3-8b with 8 rows, computed in bfloat16; and its weights, if nothing else is said."""
    given = {"batch": 8, "dtype": "bfloat16", "weights_dtype": "bfloat16", **options}
    given = {"table": build("llama3-8b"), **given}
    request = Request(layout=load_layout(layout), mesh_sizes=sizes, length=length, **given)  # pyright: ignore[reportArgumentType]
    return make_plan(request).memory


VOCAB_8B, EMBED_8B, LAYERS_8B = 128256, 4096, 32
LAYER_8B = 2 * EMBED_8B**2 + 2 * EMBED_8B * 1024 + 3 * EMBED_8B * 14336
"""Elements of the matrices of a layer."""
NORMS_8B = 3 * EMBED_8B
"""Those of the norms of a layer and of the last one, which PyTorch shards too."""


def test_the_peak_is_at_the_logits_where_the_vocabulary_is_large() -> None:
    memory, tokens = memory_of("fsdp", {"fsdp": 8}), 8192
    scores, kernel = tokens * VOCAB_8B * (4 + 2), VOCAB_8B * EMBED_8B * 2
    kept = (LAYERS_8B + 2) * tokens * EMBED_8B * 2
    # No gradient is there yet: the memory that is counted for these is free for some of it.
    assert memory.activations_bytes == kept + scores + kernel - memory.gradients_bytes


def test_a_sharded_vocabulary_shares_the_logits_of_whole_sequences() -> None:
    memory, tokens = memory_of("fsdp-tp", {"fsdp": 2, "tensor": 4}), 4 * 8192
    scores, kernel = tokens * VOCAB_8B // 4 * (4 + 2), VOCAB_8B // 4 * EMBED_8B * 2
    kept = (LAYERS_8B // 4 + 2) * tokens * EMBED_8B * 2
    assert memory.activations_bytes == kept + scores + kernel - memory.gradients_bytes


def test_the_peak_is_at_the_embedding_where_there_are_few_tokens() -> None:
    own = VOCAB_8B * EMBED_8B // 8 * 2
    assert memory_of("fsdp", {"fsdp": 8}, length=64).activations_bytes == VOCAB_8B * EMBED_8B * (4 + 2) - own


def test_a_tpu_holds_the_layers_cast_to_the_dtype_of_the_computation() -> None:
    chip = read_machine("v5p:2x2x2").chip
    narrow, wide = (memory_of("fsdp", {"fsdp": 8}, chip=chip, weights_dtype=one) for one in ("bfloat16", "float32"))
    # No gradient is there at the logits. Norms are computed in the dtype at rest.
    cast = LAYERS_8B * LAYER_8B // 8 * 2
    at_the_logits = [one.activations_bytes + one.gradients_bytes for one in (narrow, wide)]
    assert at_the_logits[1] - at_the_logits[0] == cast


def test_a_tpu_pads_small_heads_that_layers_save() -> None:
    chip = read_machine("v5p:2x2x2").chip
    options: dict[str, Any] = {"table": build("llama3-1b"), "chip": chip}
    full, kept = (memory_of("fsdp", {"fsdp": 8}, remat=one, **options) for one in ("full", "keep=attention.queries"))
    assert kept.activations_bytes - full.activations_bytes == 16 * 8192 * 32 * 128 * 2


def test_a_tpu_has_no_cotangent_of_tied_logits_of_several_rows() -> None:
    chip = read_machine("v5p:2x2x2").chip
    options: dict[str, Any] = {"table": build("llama3-1b"), "length": 4096}
    for tokens, width in ((1, 4 + 2), (2, 4)):
        memory = memory_of("fsdp", {"fsdp": 8}, batch=8 * tokens, chip=chip, **options)
        scores, kernel = tokens * 4096 * VOCAB_8B * width, VOCAB_8B * 2048 * 2
        kept = (16 + 2) * tokens * 4096 * 2048 * 2
        assert memory.activations_bytes == kept + scores + kernel - memory.gradients_bytes


def test_on_torch_the_peak_is_where_the_loss_is_computed() -> None:
    memory = memory_of("fsdp", {"fsdp": 8}, engine="torch", weights_dtype="float32")
    # The inputs of all layers, the output of the last, and the projection's input.
    streams = (LAYERS_8B + 2) * 8192 * EMBED_8B * 2
    # Both ends stay gathered, and the last layer's gather is there until the next.
    gathered = 2 * (2 * VOCAB_8B * EMBED_8B + LAYER_8B + NORMS_8B)
    assert memory.activations_bytes == 8 * 8192 * VOCAB_8B + streams + gathered - memory.gradients_bytes


def test_on_torch_the_peak_is_at_the_embedding_where_there_are_few_tokens() -> None:
    memory, tokens = memory_of("fsdp", {"fsdp": 8}, length=2048, engine="torch", weights_dtype="float32"), 2048
    one_end = VOCAB_8B * EMBED_8B
    gradient, rows = one_end * (4 + 2), tokens * EMBED_8B * (4 + 2)
    # Both ends, the gradient of the logits' weight; those of the layers exist, and those of the ends do not.
    beside = 3 * 2 * one_end - 4 * (2 * one_end // 8 + EMBED_8B // 8)
    last_norm = 2 * 2 * EMBED_8B
    assert memory.activations_bytes == gradient + rows + beside + last_norm


def test_on_torch_layers_that_keep_all_keep_one_mask() -> None:
    options: dict[str, Any] = {"engine": "torch", "weights_dtype": "float32"}
    policies = ("none", "none,recompute=mlp.gate,weights", "none,recompute=weights")
    none, again, gathered = (memory_of("fsdp", {"fsdp": 8}, remat=one, **options).activations_bytes for one in policies)
    assert gathered - again == LAYERS_8B * 8192 * 14336 * 2 + 8192 * 8192 * 2
    assert none - gathered == LAYERS_8B * 2 * (LAYER_8B + 2 * EMBED_8B)


def test_a_tpu_holds_the_gradients_of_one_component_and_one_weight_at_a_time() -> None:
    chip = read_machine("v5p:2x1x1").chip
    memory = plan_of("llama3-test", "fsdp", {"fsdp": 2}, chip=chip).memory
    # The widest component is attention: input, q, k, v, attended, projected; positions and segments.
    attention = 6 * STREAM + 6 * BATCH // 2 * LENGTH * 4
    gathered = 4 * (4 * EMBED * EMBED + 3 * EMBED * WIDTH) + 2 * 4 * EMBED
    assert memory.activations_bytes == KEPT + WORKING // 2 + attention + gathered + 4 * EMBED * WIDTH - LAST


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
    two, three = (plan_of("llama3-test", "pp", {"stage": n, "fsdp": 2}).memory for n in (2, 3))
    assert two.activations_bytes - three.activations_bytes == (3 - 2) * STREAM


def test_in_a_stage_of_jax_one_gradient_of_a_layer_exists_at_a_time() -> None:
    one, three = (plan_of("llama3-test", "pp", {"stage": n, "fsdp": 2}) for n in (1, 3))
    gathered = [w.shape for w in one.weights if w.stack is not None and w.at_rest != w.in_use]
    sizes = [4 * prod(shape) for shape in gathered]
    difference = one.memory.activations_bytes - three.memory.activations_bytes
    assert difference == (6 - 2) * STREAM + sum(sizes) - max(sizes) - LAST


def test_every_stage_of_one_program_holds_as_many_layers_as_the_fullest() -> None:
    plan = plan_of("llama3-test", "pp", {"stage": 4, "fsdp": 2})
    layer = 2 * EMBED + (4 * EMBED * EMBED + 3 * EMBED * WIDTH) // 2
    # 8 units over 4 stages: two have two layers. Norms are replicated, and the ends are on every stage.
    assert plan.memory.weights_bytes == 4 * (2 * layer + 2 * VOCAB * EMBED // 2 + EMBED)
    assert plan.memory.gradients_bytes == plan.memory.weights_bytes
    assert not plan.faults

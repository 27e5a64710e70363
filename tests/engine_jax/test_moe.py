"""Experts: what every token gets, whatever the grouping; what is dropped; what crosses the links."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.core.capacity import num_slots
from shardwright.engine_jax.layer_io import stay
from shardwright.engine_jax.moe import assign, capacity_of, experts_layer, from_slots, to_slots
from shardwright.engine_jax.routing import largest, moved_bias, route
from shardwright.models.parts.architecture import Experts

ROWS, LENGTH, EMBED, WIDTH = 4, 16, 8, 12
EXPERTS = Experts(
    num=8, width=WIDTH, top_k=3, scoring="sigmoid", num_groups=4, chosen_groups=2, scale=2.5, balanced_by_bias=True
)
CAPACITIES = [None, 0.5]
UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""These programs run once: half the time to compile them is what counts."""


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "router.kernel": (EMBED, EXPERTS.num),
        "router.bias": (EXPERTS.num,),
        "moe.gate": (EXPERTS.num, EMBED, WIDTH),
        "moe.up": (EXPERTS.num, EMBED, WIDTH),
        "moe.down": (EXPERTS.num, WIDTH, EMBED),
    }
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module", name="x_BLM")
def inputs() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)


@pytest.fixture(scope="module", name="valid_BL")
def not_padding() -> np.ndarray:
    return np.arange(LENGTH)[None] < np.asarray([LENGTH, LENGTH - 3, 5, LENGTH])[:, None]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def token_by_token(x_BLM, valid_BL, weights, experts: Experts) -> tuple[np.ndarray, np.ndarray, int]:
    """The definition: each token in turn asks its experts, who refuse it when they are full."""
    out_BLM, counts_E, num_dropped = np.zeros_like(x_BLM), np.zeros(experts.num, int), 0
    even_share = experts.top_k * LENGTH / experts.num
    capacity = LENGTH if experts.capacity_factor is None else ceil(experts.capacity_factor * even_share)
    for row in range(ROWS):
        taken_E = np.zeros(experts.num, int)
        for token in np.flatnonzero(valid_BL[row]):
            x_M = x_BLM[row, token]
            scores_E = sigmoid(x_M @ weights["router.kernel"])
            worth_NX = (scores_E + weights["router.bias"]).reshape(experts.num_groups, -1)
            groups = np.argsort(-np.sort(worth_NX, axis=1)[:, -2:].sum(axis=1))[: experts.chosen_groups]
            allowed_NX = np.full_like(worth_NX, -np.inf)
            allowed_NX[groups] = worth_NX[groups]
            chosen = np.argsort(-allowed_NX.reshape(-1))[: experts.top_k]
            for expert in chosen:
                counts_E[expert] += 1
                if taken_E[expert] >= capacity:
                    num_dropped += 1
                    continue
                taken_E[expert] += 1
                gate_F, up_F = x_M @ weights["moe.gate"][expert], x_M @ weights["moe.up"][expert]
                share = scores_E[expert] / scores_E[chosen].sum() * experts.scale
                out_BLM[row, token] += share * ((gate_F * sigmoid(gate_F) * up_F) @ weights["moe.down"][expert])
    return out_BLM, counts_E, num_dropped


def layer(experts: Experts, groups: int, place=stay):
    """Output, counts, and the gradients of a loss, compiled."""

    def loss(x_BLM, valid_BL, weights):
        out_BLM, counts_E = experts_layer(x_BLM, valid_BL, weights, experts, groups, place)
        return jnp.sum(jnp.sin(out_BLM)), (out_BLM, counts_E)

    return jax.value_and_grad(loss, argnums=(0, 2), has_aux=True)


@pytest.mark.parametrize("capacity_factor", CAPACITIES)
def test_every_grouping_does_what_the_definition_says(capacity_factor, x_BLM, valid_BL, weights) -> None:
    experts = replace(EXPERTS, capacity_factor=capacity_factor)
    expected_BLM, expected_E, num_dropped = token_by_token(x_BLM, valid_BL, weights, experts)
    assert (num_dropped > 0) == (capacity_factor is not None)
    gradients = []
    for groups in (1, 2, 4):
        (_, (out_BLM, counts_E)), gradient = jax.jit(layer(experts, groups), compiler_options=UNOPTIMISED)(
            x_BLM, valid_BL, weights
        )
        np.testing.assert_allclose(out_BLM, expected_BLM, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(counts_E, expected_E)
        gradients.append(gradient)
    for gradient in gradients[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), gradient, gradients[0])


def test_slots_and_tokens_are_each_others_transpose(x_BLM, valid_BL) -> None:
    experts, groups = replace(EXPERTS, capacity_factor=0.5), 2
    rng = np.random.default_rng(3)
    experts_BLK = np.argsort(rng.random((ROWS, LENGTH, experts.num)), axis=-1)[..., : experts.top_k].astype(np.int32)
    matching = jax.jit(assign, static_argnums=(2, 3))(experts_BLK, valid_BL, experts, groups)
    slots = experts.num * num_slots(LENGTH // groups, capacity_of(experts, LENGTH))

    def by_one_hot_in(x_BGTM):
        """The same as a matrix: slot c holds token t where one of its choices points to c."""
        hit_BGTKC = matching.slot_BGTK[..., None] == jnp.arange(slots)[None, None, None, None]
        return jnp.einsum("BGTKC,BGTM->BGCM", hit_BGTKC.astype(jnp.float32), x_BGTM)

    def by_one_hot_out(y_BGCM):
        hit_BGTKC = matching.slot_BGTK[..., None] == jnp.arange(slots)[None, None, None, None]
        return jnp.einsum("BGTKC,BGCM->BGTKM", hit_BGTKC.astype(jnp.float32), y_BGCM)

    x_BGTM = jnp.asarray(x_BLM).reshape(ROWS, groups, LENGTH // groups, EMBED)
    y_BGCM = jnp.asarray(rng.normal(size=(ROWS, groups, slots, EMBED)).astype(np.float32))
    for ours, oracle, argument in ((to_slots, by_one_hot_in, x_BGTM), (from_slots, by_one_hot_out, y_BGCM)):
        expected, pull_expected = jax.vjp(oracle, argument)
        cotangent = jnp.asarray(rng.normal(size=expected.shape).astype(np.float32))
        out, pull = jax.vjp(lambda array, function=ours: function(array, matching), argument)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(pull(cotangent)[0], pull_expected(cotangent)[0], rtol=0, atol=1e-5)


def test_bias_chooses_and_does_not_weigh(x_BLM, weights) -> None:
    experts = replace(EXPERTS, num_groups=1, chosen_groups=1)
    favoured = jnp.zeros(experts.num).at[5].set(10.0)
    kernel = jnp.asarray(weights["router.kernel"])
    with_bias = route(jnp.asarray(x_BLM), kernel, favoured, experts, stay)
    assert bool(jnp.all(with_bias.experts_BLK[..., 0] == 5))
    scores_BLE = sigmoid(x_BLM @ weights["router.kernel"])
    chosen_BLK = np.take_along_axis(scores_BLE, np.asarray(with_bias.experts_BLK), axis=-1)
    expected = experts.scale * chosen_BLK / chosen_BLK.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(with_bias.weights_BLK, expected, rtol=1e-5)


def test_bias_moves_against_the_load_by_the_rate() -> None:
    bias = moved_bias(jnp.zeros((1, 4)), jnp.asarray([[10, 0, 5, 5]]), rate=0.001)
    np.testing.assert_allclose(bias, [[-0.001, 0.001, 0.0, 0.0]])


def test_largest_is_top_k() -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 4, 9)).astype(np.float32))
    for num in (1, 4, 9):
        for ours, oracle in zip(largest(x, num), jax.lax.top_k(x, num), strict=True):
            np.testing.assert_array_equal(ours, oracle)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_only_tokens_cross_the_links(capacity_factor, x_BLM, valid_BL, weights) -> None:
    """Length over `expert` outside, experts over `expert` inside: four all-to-alls of slots, forward and backward.

    Beside them only the gradients' sums and the integers that count tokens cross.
    """
    experts = replace(EXPERTS, capacity_factor=capacity_factor)
    mesh = jax.make_mesh((2, 4), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    tokens, slots = PartitionSpec("fsdp", "expert"), PartitionSpec("expert", "fsdp")

    def place(name: str, array: jax.Array) -> jax.Array:
        spec = slots if name.startswith("moe.") else tokens
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    on_tokens = NamedSharding(mesh, tokens)
    on_weights = {
        name: NamedSharding(mesh, PartitionSpec("expert") if name.startswith("moe.") else PartitionSpec())
        for name in weights
    }
    shardings = (on_tokens, on_tokens, on_weights)
    step = jax.jit(layer(experts, groups=4, place=place), in_shardings=shardings, compiler_options=UNOPTIMISED)
    compiled = step.lower(x_BLM, valid_BL, weights).compile()
    found = re.findall(
        r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text()
    )
    floats = [kind for result, kind in found if re.search(r"\b(f32|bf16)\[", result)]
    assert floats.count("all-to-all") == 4
    assert set(floats) == {"all-to-all", "all-reduce"}
    integers = [result for result, _ in found if not re.search(r"\b(f32|bf16)\[", result)]
    assert all(np.prod([int(n) for n in re.findall(r"\d+", result.split("{")[0])[1:]]) <= 64 for result in integers)
    (_, (out_BLM, _)), _ = compiled(*jax.device_put((x_BLM, valid_BL, weights), shardings))
    expected_BLM, _, _ = token_by_token(x_BLM, valid_BL, weights, experts)
    np.testing.assert_allclose(out_BLM, expected_BLM, rtol=0, atol=1e-5)

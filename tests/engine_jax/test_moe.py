"""Experts under every layout: their outputs, dropped assignments, overflow of buffers, and gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.program.primitives import Route
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import traffic_of
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.experts.route import route, top_k, updated_bias
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.shardings import partition_spec
from shardwright.engine_jax.lowering.updates import reduced
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.models.parts.architecture import Experts
from tests.engine_jax.part_of_layer import added_by_part
from tests.engine_jax.program import Program
from tests.matrix import some

ROWS, LENGTH, EMBED, WIDTH = 8, 16, 16, 8
TABLE = build(
    "deepseek3-test",
    {
        "num_layers": "2",
        "embed": str(EMBED),
        "expert_mlp": str(WIDTH),
        "num_experts": "8",
        "num_groups": "4",
        "num_chosen_groups": "2",
        "top_k": "3",
    },
)
EXPERTS: Experts = TABLE.architecture.experts
STACK = "moe_layers."
DROPPING = 0.5
"""A capacity factor that drops many assignments: each expert keeps 3 tokens of a row of 16."""
SHARED = "name: shared\nmesh: {fsdp: 2, tensor: 4}\nroles:\n  fsdp: fsdp\n  tensor: {elsewhere: tensor, moe: expert}\n"
"""Outside the experts tokens are replicated over the expert axis: each device dispatches its slice."""
IDLE = "name: idle\nmesh: {context: 2, expert: 4}\nroles:\n  context: context\n  expert: {elsewhere: fsdp, router: idle, moe: expert}\n"
WIDE = (
    "name: wide\nmesh: {expert: 4, tensor: 2}\nroles:\n  expert: {elsewhere: context, moe: expert}\n  tensor: tensor\n"
)
"""Each expert's matrices are sharded in two, and experts are sharded over another axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    layout: str
    mesh: str = ""
    move: str = "all-to-all"
    capacity_factor: float | None = None
    load_balanced: bool = False
    expert_buffer: float | None = None

    def __str__(self) -> str:
        layout = self.layout.split("\n")[0].removeprefix("name: ")
        capacity = "" if self.capacity_factor is None else " drops"
        return f"{layout} {self.mesh} {self.move}{capacity}{' balanced' if self.load_balanced else ''}"


ALONE = Case(layout="fsdp", mesh="fsdp=1")
EP, EP_AS_CP, TWO_AXES = (
    Case(layout="ep", mesh="fsdp=2,expert=4"),
    Case(layout="ep-as-cp", mesh="fsdp=2,expert=4"),
    Case(layout="cp-as-ep", mesh="fsdp=2,context=2,expert=2"),
)
CASES = [
    ALONE,
    replace(ALONE, capacity_factor=DROPPING),
    Case(layout="fsdp", mesh="fsdp=8", capacity_factor=DROPPING),
    Case(layout="cp", mesh="fsdp=2,context=4", capacity_factor=DROPPING),
    Case(layout="cp", mesh="fsdp=2,context=4", capacity_factor=DROPPING, load_balanced=True),
    Case(layout="fsdp-tp", mesh="fsdp=4,tensor=2"),
    *(replace(EP, move=move) for move in ("all-to-all", "ring", "weights")),
    *(replace(EP_AS_CP, move=move, capacity_factor=DROPPING) for move in ("all-to-all", "ring", "weights")),
    replace(EP_AS_CP, capacity_factor=DROPPING, load_balanced=True),
    *(replace(TWO_AXES, move=move, capacity_factor=DROPPING) for move in ("all-to-all", "ring")),
    Case(layout="tp-as-ep", mesh="fsdp=2,tensor=4"),
    *(Case(layout=SHARED, move=move) for move in ("all-to-all", "ring", "weights")),
    Case(layout=IDLE, capacity_factor=DROPPING),
    *(Case(layout=WIDE, move=move, capacity_factor=DROPPING) for move in ("all-to-all", "ring", "weights")),
    Case(layout="shard-exp-on-fsdp", mesh="fsdp=2,expert=4"),
]


class Result(NamedTuple):
    out_BLM: Any
    counts: MoeCounts
    d_x_BLM: Any
    d_weights: dict[str, Any]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


X_BLM = 3 * drawn(1, ROWS, LENGTH, EMBED)
VALID_BL = np.arange(LENGTH)[None] < np.asarray([LENGTH, LENGTH - 3, 5, LENGTH, 0, 1, LENGTH, 9])[:, None]
WEIGHTS = {
    "router.kernel": drawn(2, EMBED, EXPERTS.num),
    "router.bias": drawn(3, EXPERTS.num),
    "moe.gate": drawn(4, EXPERTS.num, EMBED, WIDTH),
    "moe.up": drawn(5, EXPERTS.num, EMBED, WIDTH),
    "moe.down": drawn(6, EXPERTS.num, WIDTH, EMBED),
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@cache
def token_by_token(capacity_factor: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition: each token in turn is assigned to its experts, and dropped by those at their capacity.

    The output, the assignments of each expert, and which expert keeps which token.
    """
    out_BLM, counts_E, kept_BLE = np.zeros_like(X_BLM), np.zeros(EXPERTS.num, int), np.zeros((ROWS, LENGTH, 8), bool)
    even_load = EXPERTS.top_k * LENGTH / EXPERTS.num
    capacity = LENGTH if capacity_factor is None else ceil(capacity_factor * even_load)
    for row in range(ROWS):
        of_row_E = np.zeros(EXPERTS.num, int)
        for token in np.flatnonzero(VALID_BL[row]):
            x_M = X_BLM[row, token]
            scores_E = sigmoid(x_M @ WEIGHTS["router.kernel"])
            ranked_NX = (scores_E + WEIGHTS["router.bias"]).reshape(EXPERTS.num_groups, -1)
            groups = np.argsort(-np.sort(ranked_NX, axis=1)[:, -2:].sum(axis=1))[: EXPERTS.chosen_groups]
            allowed_NX = np.full_like(ranked_NX, -np.inf)
            allowed_NX[groups] = ranked_NX[groups]
            chosen = np.argsort(-allowed_NX.reshape(-1))[: EXPERTS.top_k]
            for expert in chosen:
                counts_E[expert] += 1
                if of_row_E[expert] >= capacity:
                    continue
                of_row_E[expert] += 1
                kept_BLE[row, token, expert] = True
                gate_F, up_F = x_M @ WEIGHTS["moe.gate"][expert], x_M @ WEIGHTS["moe.up"][expert]
                weight = scores_E[expert] / scores_E[chosen].sum() * EXPERTS.scale
                out_BLM[row, token] += weight * ((gate_F * sigmoid(gate_F) * up_F) @ WEIGHTS["moe.down"][expert])
    return out_BLM, counts_E, kept_BLE


@cache
def dense_gradients(capacity_factor: float | None) -> tuple[Any, dict[str, Any]]:
    """Gradients of a loss: every token through every expert, weighted by its routing weights."""
    kept_BLE, chosen_BLE = token_by_token(capacity_factor)[2], token_by_token(None)[2]

    def loss(x_BLM, weights):
        scores_BLE = jax.nn.sigmoid(x_BLM @ weights["router.kernel"])
        of_chosen_BL1 = jnp.sum(scores_BLE * chosen_BLE, axis=-1, keepdims=True)
        weights_BLE = scores_BLE / jnp.where(VALID_BL[..., None], of_chosen_BL1, 1.0) * EXPERTS.scale
        gate_BLEF = jnp.einsum("BLM,EMF->BLEF", x_BLM, weights["moe.gate"])
        hidden_BLEF = jax.nn.silu(gate_BLEF) * jnp.einsum("BLM,EMF->BLEF", x_BLM, weights["moe.up"])
        y_BLEM = jnp.einsum("BLEF,EFM->BLEM", hidden_BLEF, weights["moe.down"])
        return loss_of(jnp.einsum("BLEM,BLE->BLM", y_BLEM, weights_BLE * kept_BLE))

    d_x, d_weights = jax.jit(jax.grad(loss, (0, 1)))(
        jnp.asarray(X_BLM), {n: jnp.asarray(w) for n, w in WEIGHTS.items()}
    )
    return np.asarray(d_x), {name: np.asarray(d) for name, d in d_weights.items()}


def loss_of(out_BLM: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(out_BLM))


def plan_of(case: Case) -> Plan:
    layout = read_layout(parse_yaml(case.layout, "mine.yaml")) if "\n" in case.layout else load_layout(case.layout)
    sizes = {axis: int(size) for axis, size in (item.split("=") for item in case.mesh.split(",") if item)}
    table = replace(
        TABLE,
        capacity_factor=case.capacity_factor,
        architecture=replace(TABLE.architecture, experts=replace(EXPERTS, capacity_factor=case.capacity_factor)),
    )
    return make_plan(
        Request(
            layout=replace(layout, move_moe=case.move),
            table=table,
            batch=ROWS,
            length=LENGTH,
            mesh_sizes=sizes,
            load_balanced=case.load_balanced,
            expert_buffer=case.expert_buffer,
        )
    )


def of_one_layer(plan: Plan, name: str) -> Spec:
    row = plan.by_name[STACK + name]
    return Spec(row.spec.dims[len(row.spec.dims) - len(row.shape) :])


def lowered_layer(case: Case) -> tuple[Any, Plan]:
    """The layer of a case with its gradients, each device with its shards."""
    plan = plan_of(case)
    links = links_of(plan)
    stream = partition_spec(plan.by_name["residual.stream"].in_use)
    specs = {name: partition_spec(of_one_layer(plan, name)) for name in WEIGHTS}
    dispatched = plan.mesh.larger_than_one(plan.by_name["router.grouped"].in_use.axes)

    def step(x_BLM, segments_BL, weights):
        def loss(x_BLM, weights):
            used = {name: links.use(STACK + name, weight) for name, weight in weights.items()}
            batch = {"positions": jnp.zeros_like(segments_BL), "segments": segments_BL}
            out_BLM, counts = added_by_part(
                "router.input", "router.output", x_BLM, batch, used, plan.request.table, links, STACK[:-1]
            )
            return loss_of(out_BLM), (out_BLM, counts)

        (d_x, d_weights), (out_BLM, counts) = jax.grad(loss, (0, 1), has_aux=True)(x_BLM, weights)
        d_weights = {name: reduced(plan, STACK + name, d) for name, d in d_weights.items()}
        return Result(out_BLM, jax.lax.psum(counts, dispatched) if dispatched else counts, d_x, d_weights)

    replicated = PartitionSpec()
    function = jax.shard_map(
        step,
        mesh=device_mesh(plan.mesh),
        in_specs=(stream, partition_spec(plan.by_name["input.segments"].in_use), specs),
        out_specs=Result(stream, MoeCounts(replicated, replicated, replicated), stream, specs),
        check_vma=False,
    )
    arguments = X_BLM, VALID_BL.astype(np.int32), WEIGHTS
    return jax.jit(function).lower(*arguments), plan


def compiled_layer(case: Case) -> tuple[Any, Plan]:
    lowered, plan = lowered_layer(case)
    return lowered.compile(), plan


def result_of(case: Case) -> Result:
    """The result of the layer of a case, its rows in the order of the text."""
    compiled, plan = compiled_layer(case)
    order = np.concatenate([np.arange(LENGTH).reshape(len(plan.row_chunks), -1)[chunk] for chunk in plan.row_chunks])
    x_BLM, segments_BL = X_BLM[:, order], VALID_BL[:, order].astype(np.int32)
    result = compiled(*jax.device_put((x_BLM, segments_BL, WEIGHTS), compiled.input_shardings[0]))
    back = np.argsort(order)
    return result._replace(out_BLM=np.asarray(result.out_BLM)[:, back], d_x_BLM=np.asarray(result.d_x_BLM)[:, back])


@pytest.mark.parametrize("case", some(CASES, (4, 5, 6, 8, 12, 13, 15, 17, 20, 22)), ids=str)
def test_every_layout_follows_the_definition(case: Case) -> None:
    expected_BLM, expected_E, kept_BLE = token_by_token(case.capacity_factor)
    result = result_of(case)
    np.testing.assert_allclose(result.out_BLM, expected_BLM, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(result.counts.by_expert, expected_E)
    assert int(result.counts.dropped) == expected_E.sum() - kept_BLE.sum()
    assert (int(result.counts.dropped) > 0) == (case.capacity_factor is not None)
    assert int(result.counts.overflow) == 0
    d_x_BLM, d_weights = dense_gradients(case.capacity_factor)
    np.testing.assert_allclose(result.d_x_BLM, d_x_BLM, rtol=0, atol=1e-5 * np.abs(d_x_BLM).max())
    for name, d in d_weights.items():
        if name != "router.bias":
            assert np.linalg.norm(result.d_weights[name] - d) <= 1e-5 * np.linalg.norm(d), name


def test_overflow_is_counted_and_contributes_nothing() -> None:
    case = replace(EP, expert_buffer=0.5)
    buffer_rows = traffic_of(plan_of(case).request, plan_of(case).mesh).buffer_rows(0.5)
    kept_BLE = token_by_token(None)[2]
    # Rows are sharded over fsdp, then over the expert axis; experts over the latter, two on each device.
    received = kept_BLE.reshape(2, ROWS // 2 * LENGTH, 4, 2).sum(axis=(1, 3))
    assert np.any(received > buffer_rows)
    assert np.any(received < buffer_rows)
    result = result_of(case)
    assert int(result.counts.overflow) == np.maximum(received - buffer_rows, 0).sum()
    np.testing.assert_array_equal(result.counts.by_expert, kept_BLE.sum(axis=(0, 1)))
    assert np.all(np.isfinite(result.out_BLM))
    # The first rows of a buffer are those of its first expert. Tokens without overflow have their full output.
    difference = np.abs(result.out_BLM - token_by_token(None)[0]).max(axis=-1)
    assert np.any(difference > 1e-3)
    assert np.all(difference[~kept_BLE.any(axis=-1)] == 0)


@pytest.mark.parametrize("move", ["ring", "weights"])
def test_one_device_for_all_experts_has_one_program(move: str) -> None:
    texts = {
        lowered_layer(Case(layout="ep", mesh="fsdp=2,expert=1", move=how))[0].as_text() for how in ("all-to-all", move)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("move", ["all-to-all", "ring", "weights"])
def test_tokens_or_weights_are_moved_and_never_both(move: str) -> None:
    compiled, plan = compiled_layer(replace(EP_AS_CP, move=move))
    resharding = [one for one in Program(compiled.as_text()).collectives(plan.mesh) if one.axes == ("expert",)]
    floats = [(one.kind, one.shape) for one in resharding if one.dtypes == ("float32",)]
    # Matrices of experts have three dims, tokens as they are gathered have two.
    tokens = (ROWS // 2 * LENGTH, EMBED)
    gathered = [shape for kind, shape in floats if kind == "all-gather"]
    assert any(len(shape) == 3 for shape in gathered) == (move == "weights")
    assert (tokens in gathered) == (move == "ring")
    assert any(kind == "all-to-all" for kind, _ in floats) == (move == "all-to-all")


def test_bias_affects_the_choice_and_not_the_weights() -> None:
    experts = replace(EXPERTS, num_groups=1, chosen_groups=1)
    favoured = jnp.zeros(experts.num).at[5].set(10.0)
    form = Route(**{field.name: getattr(experts, field.name) for field in fields(Route)})
    scores_BLE = jnp.asarray(X_BLM @ WEIGHTS["router.kernel"])
    routing = route(scores_BLE, jnp.ones(VALID_BL.shape, bool), favoured, form, ("experts", "weights"))
    assert bool(jnp.all(routing.experts_BLK[..., 0] == 5))
    scores_BLE = sigmoid(X_BLM @ WEIGHTS["router.kernel"])
    chosen_BLK = np.take_along_axis(scores_BLE, np.asarray(routing.experts_BLK), axis=-1)
    expected = experts.scale * chosen_BLK / chosen_BLK.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(routing.weights_BLK, expected, rtol=1e-5)


def test_bias_moves_against_the_load_by_the_rate() -> None:
    bias = updated_bias(jnp.zeros((1, 4)), jnp.asarray([[10, 0, 5, 5]]), rate=0.001)
    np.testing.assert_allclose(bias, [[-0.001, 0.001, 0.0, 0.0]])


def test_top_k_is_that_of_jax() -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 4, 9)).astype(np.float32))
    for num in (1, 4, 9):
        for ours, oracle in zip(top_k(x, num), jax.lax.top_k(x, num), strict=True):
            np.testing.assert_array_equal(ours, oracle)

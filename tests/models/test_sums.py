"""What is derived to be a sum over devices is one: gradients of programs on two devices are those of one.

For each way to shard, every device computes its shards, sums what a ``Take`` is derived to sum, and a weight's gradient is summed where that
is derived. A sum that is missing, or one too many, gives another gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random

import jax
import numpy as np
import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.model.table import ModelTable
from shardwright.core.program.program import Program
from shardwright.core.program.sums import ProgramSums, sums_of
from shardwright.models import build
from shardwright.models.layers.decoder import program_of
from tests.matrix import some
from tests.models.drawn_programs import Drawing, drawn_program
from tests.models.evaluated import AXIS, Sharding, computed, local

ROWS, LENGTH, VOCAB = 2, 8, 32
TOKENS = frozenset({"length", "q_length", "groups"})
HEADS, HIDDEN = frozenset({"heads", "kv_heads"}), frozenset({"mlp"})
OF_TENSORS = {"attention": HEADS, "mlp": HIDDEN, "moe": HIDDEN, "embedding": {"vocab"}, "logits": {"vocab"}}

SHARDINGS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "rows": {component: frozenset({"batch"}) for component in COMPONENTS},
    "tokens": dict.fromkeys(COMPONENTS, TOKENS),
    "heads": {"attention": HEADS},
    "hidden units": {"mlp": HIDDEN, "moe": HIDDEN},
    "vocabulary": {"embedding": frozenset({"vocab"}), "logits": frozenset({"vocab"})},
    "tensors": {name: frozenset(axes) for name, axes in OF_TENSORS.items()},
    "tensors, and tokens of the stream": {
        **{name: frozenset(axes) for name, axes in OF_TENSORS.items()},
        "residual": frozenset({"length"}),
    },
    "experts": {**{name: frozenset({"batch"}) for name in COMPONENTS}, "moe": frozenset({"experts"})},
    "rows of attention alone": {"attention": frozenset({"batch"})},
    "tokens of attention alone": {"attention": TOKENS},
    "tokens of experts alone": {"router": TOKENS, "moe": TOKENS},
}

SMALL = {
    "llama3": ("llama3-test", {"embed": "8", "num_heads": "4", "num_kv_heads": "2", "head_dim": "4", "mlp": "12"}),
    "tied": (
        "llama3-test",
        {"embed": "8", "num_heads": "4", "num_kv_heads": "4", "head_dim": "4", "mlp": "12", "tied": "true"},
    ),
    "mixtral": (
        "mixtral-test",
        {"embed": "8", "num_heads": "4", "num_kv_heads": "2", "head_dim": "4", "mlp": "6", "num_experts": "4"},
    ),
    "deepseek3": (
        "deepseek3-test",
        {
            "embed": "8",
            "num_heads": "2",
            "q_lora": "6",
            "kv_lora": "4",
            "nope_dim": "4",
            "rope_dim": "2",
            "value_dim": "6",
        }
        | {"mlp": "12", "expert_mlp": "6", "num_experts": "8", "top_k": "3"},
    ),
}


@cache
def model(name: str) -> tuple[ModelTable, Program, ProgramSums]:
    base, overrides = SMALL[name]
    table = build(base, {**overrides, "num_layers": "2", "vocab": str(VOCAB)})
    program = program_of(table.architecture)
    return table, program, sums_of(program)


def weights_of(program: Program) -> dict[str, tuple[str, tuple[str, ...], tuple[int, ...], int]]:
    """Component, logical axes, shape and layers of each weight, by its name in the table."""
    weights = {}
    for step in program.steps:
        stack = program.stack(step.stack)
        for use in step.weights:
            name, num = (use.name, 0) if stack is None else (f"{stack.name}.{use.name}", stack.num)
            weights.setdefault(name, (use.component, use.logical_axes, use.shape, num))
    return weights


def drawn_params(program: Program, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        name: (draw.normal(size=(num, *shape) if num else shape) / np.sqrt(shape[0])).astype(np.float32)
        + (len(shape) == 1)
        for name, (_, _, shape, num) in weights_of(program).items()
    }


def drawn_batch(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens, targets = draw.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
    segments = np.sort(draw.integers(1, 3, (ROWS, LENGTH)), axis=1).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange((row == n).sum()) for n in (1, 2)]) for row in segments])
    fields = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions.astype(np.int32)}
    return {f"input.{name}": array for name, array in {**fields, "valid": draw.random((ROWS, LENGTH)) < 0.8}.items()}


def gradients(program: Program, params: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return jax.jit(jax.grad(lambda params: computed(program, params, batch)[0]))(params)


def on_devices(
    program: Program, sums: ProgramSums, params: dict[str, np.ndarray], batch: dict[str, np.ndarray], sharding: Sharding
) -> dict[str, np.ndarray]:
    """The gradients of each device, as the derivation says that they are summed."""
    held = {
        name: np.stack(local(params[name], [n + bool(num) for n in sharding.dims(component, axes)], sharding))
        for name, (component, axes, _, num) in weights_of(program).items()
    }
    fields = {field.name: sharding.dims(field.component, field.logical_axes) for field in program.fields}
    fed = {name: np.stack(local(batch[name], dims, sharding)) for name, dims in fields.items()}
    of_device = jax.grad(lambda params, batch: computed(program, params, batch, sums, sharding)[0])
    each = jax.jit(jax.vmap(of_device, axis_name=AXIS))(held, fed)
    return {name: _reduced(name, np.asarray(each[name]), program, sums, sharding) for name in params}


def _reduced(name: str, each: np.ndarray, program: Program, sums: ProgramSums, sharding: Sharding) -> np.ndarray:
    component, axes, _, num = weights_of(program)[name]
    of_stack = [
        step for step in program.steps for use in step.weights if name in (use.name, f"{step.stack}.{use.name}")
    ]
    contracted = tuple(dim for step in of_stack for dim in sums.gradients.get(step, ()))
    dims = sharding.dims(component, axes)
    if dims:
        return np.concatenate(each, axis=dims[0] + bool(num))
    if sharding.sums(contracted):
        return each.sum(0)
    for other in each[1:]:
        np.testing.assert_allclose(
            other, each[0], rtol=0, atol=1e-4 * np.abs(each).max() + 1e-7, err_msg=f"{name} differs"
        )
    return each[0]


def check(program: Program, sums: ProgramSums, axes: Mapping[str, frozenset[str]], seed: int = 0) -> None:
    """Raises AssertionError for a gradient on two devices that is not that on one."""
    params, batch = drawn_params(program, seed), drawn_batch(seed + 1)
    alone = gradients(program, params, batch)
    on_two = on_devices(program, sums, params, batch, Sharding(num=2, axes=axes))
    for name, gradient in alone.items():
        most = float(np.abs(gradient).max())
        np.testing.assert_allclose(on_two[name], gradient, rtol=0, atol=2e-4 * most + 1e-6, err_msg=name)


CASES = [(name, axes) for name in SMALL for axes in SHARDINGS]
COVERING = [("deepseek3", "tensors, and tokens of the stream"), ("mixtral", "experts"), ("tied", "tokens")]
NUM_DRAWN = 40


@pytest.mark.parametrize("case", some(CASES, map(CASES.index, COVERING)), ids=str)
def test_gradients_on_two_devices(case: tuple[str, str]) -> None:
    name, axes = case
    _, program, sums = model(name)
    check(program, sums, SHARDINGS[axes])


@pytest.mark.parametrize("seed", some(range(NUM_DRAWN), (3,)))
def test_gradients_of_a_drawn_program(seed: int) -> None:
    program = drawn_program(Drawing(seed=seed))
    axes = Random(seed).sample([name for name in SHARDINGS if name not in ("hidden units", "experts")], 2)
    for name in axes:
        check(program, sums_of(program), SHARDINGS[name], seed)


def test_a_fault_that_is_drawn_is_refused() -> None:
    """A norm and a bias of one summand are refused, and nothing else is: programs without one are those of the test above."""
    faults = ("bias of a summand", "norm of a summand")
    drawings = [Drawing(seed=seed, faulty=0.4) for seed in range(200)]
    refused = {drawing: _refusal(drawing) for drawing in drawings}
    assert all("a sum over heads" in text for text in refused.values() if text)
    assert {drawing for drawing, text in refused.items() if text} == {
        drawing for drawing in drawings if any(drawing.has(fault, 0.4) for fault in faults)
    }


def _refusal(drawing: Drawing) -> str:
    try:
        sums_of(drawn_program(drawing))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["attention.kv_norm", "attention.q_norm"])
def test_a_sum_that_is_left_out_is_noticed(name: str) -> None:
    """As where a norm inside of latent attention is declared as one of the residual stream is."""
    _, program, sums = model("deepseek3")
    without = {
        step: tuple(dim for dim in contracted if dim[1] != "heads" or name not in {use.name for use in step.weights})
        for step, contracted in sums.gradients.items()
    }
    with pytest.raises(AssertionError, match=f"{name} differs"):
        check(program, replace(sums, gradients=without), SHARDINGS["heads"])

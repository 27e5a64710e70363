"""A compiled step of a dense model under every preset: it has the collectives of the plan, and each device its own FLOPs."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwright.layouts import preset_names
from tests.engine_jax.program import Program, assert_flops_are_the_model_s, assert_program_is_the_plan
from tests.engine_jax.steps import Case, compiled_step, plan_of
from tests.matrix import rest

MESHES = {"ddp": "data=8", "hsdp": "data=2,fsdp=4", "fsdp": "fsdp=8", "tp": "data=2,tensor=4", "cp": "fsdp=2,context=4"}
WITH_EXPERTS = {"cp-as-ep": "fsdp=2,context=2,expert=2", "fsdp-tp": "fsdp=4,tensor=2", "tp-as-ep": "fsdp=4,tensor=2"}
CASES = {
    name: Case(model="llama3-test", layout=name, mesh={**MESHES, **WITH_EXPERTS}.get(name, "fsdp=2,expert=4"))
    for name in preset_names()
    if name != "pp"
}
CASES |= {
    "microbatches": Case(model="llama3-test", layout="hsdp", mesh="data=2,fsdp=4", rows=16, microbatches=2),
    "ring": Case(model="llama3-test", layout="cp", mesh="fsdp=2,context=4", move="attention=ring"),
    "ulysses": Case(model="llama3-test", layout="cp", mesh="fsdp=2,context=4", move="attention=ulysses"),
    "latent ring": Case(
        model="deepseek3-test",
        layout="cp",
        mesh="context=4",
        move="attention=ring",
        settings="num_dense_layers=3",
    ),
}


DENSE = {"cp", "fsdp-tp", "ulysses", "latent ring"}
"""Those of `make test`, beside the steps that `test_llama3_steps.py` compiles."""


@pytest.mark.parametrize("case", [one if name in DENSE else rest(one) for name, one in CASES.items()], ids=CASES)
def test_a_step_has_the_collectives_of_the_plan(case: Case) -> None:
    assert_program_is_the_plan(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize(
    "case", [one if name in DENSE else rest(one) for name, one in CASES.items() if not one.experts], ids=str
)
def test_each_device_computes_only_its_own_flops(case: Case) -> None:
    assert_flops_are_the_model_s(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize("precision", ["fp8-current", *map(rest, ("fp8-delayed", "fp8-delayed gather_quantized=1"))])
def test_amaxes_are_reduced_as_the_plan_says(precision: str) -> None:
    """Once for weights with the same input, and never again in the backward pass; delayed ones once a step, all that have the same axes
    together. They are reduced as integers."""
    case = Case(model="llama3-test", layout="fsdp-tp", mesh="fsdp=2,tensor=2", precision=precision)
    plan = plan_of(case)
    found: Counter[tuple[str, ...]] = Counter()
    for one in Program(compiled_step(case).as_text()).collectives(plan.mesh):
        if one.kind == "all-reduce" and one.dtypes == ("int32",) and one.component in ("attention", "mlp"):
            found[one.axes] += one.bytes_per_device * one.count_per_step
    planned: Counter[tuple[str, ...]] = Counter()
    for row in plan.collectives:
        if row.kind == "all-reduce" and row.component in ("attention", "mlp"):
            planned[row.axes] += row.bytes_per_device * row.count_per_step
    assert found == planned
    of_gathered = set() if "gather_quantized" in precision else {("tensor",)}
    assert set(planned) == {("fsdp",), ("fsdp", "tensor"), *of_gathered}

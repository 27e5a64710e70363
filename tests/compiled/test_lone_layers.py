"""Amaxes of a layer in a loop over one layer, which is unrolled: those of weights may be reduced once for passes that share them, those of
inputs never, and those of layers in a longer loop neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.core.recipes.presets import preset
from tests.compiled.test_rewrites import Case, Program, counted, of

OPTIONS = {"precision": preset("fp8-current"), "mesh_sizes": {"fsdp": 2, "tensor": 4}}
OF_WEIGHTS: dict[str, Any] = {"component": "mlp", "maximum": True, "axes": ("tensor",)}
"""Of the matrices, which tensor shards. The axes of an input's amax are these and those of the batch."""
OF_INPUTS: dict[str, Any] = {"component": "mlp", "maximum": True, "axes": ("fsdp", "tensor")}


def once_for_all_microbatches(wanted: dict[str, Any]) -> Program:
    return counted(lambda one: one.count_per_step // 2, phase="forward", **wanted)


def not_in_the_recomputation(wanted: dict[str, Any]) -> Program:
    return counted(lambda _: 0, phase="recompute", **wanted)


CASES = [
    Case(
        rewrite=rewrite,
        target=target,
        model="llama3-test num_layers=1",
        layout="fsdp-tp",
        options={**OPTIONS, "microbatches": microbatches},
        explained=change(OF_WEIGHTS),
        not_explained=change(OF_INPUTS),
    )
    for rewrite, target, microbatches, change in (
        ("gathered once", "v5p:2x2x2", 2, once_for_all_microbatches),
        ("kept from forward", "cpu:8", 1, not_in_the_recomputation),
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rewrite)
def test_amaxes_of_weights_may_be_reduced_once(case: Case) -> None:
    agreement = of(case, case.explained)
    assert not agreement.of_state("unmatched")
    assert {name for row in agreement.rows for name in row.explained_by} == {case.rewrite}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rewrite)
def test_those_of_inputs_may_not(case: Case) -> None:
    assert of(case, case.not_explained).of_state("unmatched")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rewrite)
def test_nor_those_of_layers_in_a_loop(case: Case) -> None:
    looped = replace(case, model="llama3-test num_layers=2")
    assert of(looped, looped.explained).of_state("unmatched")

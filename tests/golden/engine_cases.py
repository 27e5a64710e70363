"""The cases of what an engine does not run: each kind under that engine, and a similar request that it runs."""

from __future__ import annotations

from shardwright.cost import read_machine
from tests.golden.findings_case import Case, mine

TORCH, JAX = {"engine": "torch", "devices": 8}, {"engine": "jax", "devices": 8}
STAGED = {"devices": 8, "microbatches": 2, "batch": 16}
TWO_TENSOR = "a: tensor\nb: tensor"
ENDS_OF_ITS_OWN = mine("fsdp: fsdp\ntensor: {elsewhere: tensor, logits: idle}", "{fsdp: auto, tensor: 2}")

ON_ENGINES: tuple[Case, ...] = (
    Case(
        name="SW415-stages",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 1}}},
    ),
    Case(
        name="SW415-stages-of-the-layers-alone",
        layout=mine("fsdp: fsdp\nx: {elsewhere: stage, embedding: fsdp, logits: tensor}", "{fsdp: auto, x: 2}"),
        options={**STAGED, "engine": "torch"},
        neighbour={
            "layout": mine("fsdp: fsdp\nx: {elsewhere: fsdp, embedding: fsdp, logits: tensor}", "{fsdp: auto, x: 2}")
        },
    ),
    Case(
        name="SW415-slices",
        layout=mine(TWO_TENSOR, "{a: 2, b: 2}", "rules: {attention: {heads: [b]}, mlp: {mlp: [b]}}\n"),
        neighbour={
            "layout": mine(TWO_TENSOR, "{a: 2, b: 2}", "rules: {attention: {heads: [a]}, mlp: {mlp: [a, b]}}\n")
        },
    ),
    Case(
        name="SW415-tied",
        model="llama3-test tied=true",
        layout=ENDS_OF_ITS_OWN,
        options=TORCH,
        neighbour={"options": JAX},
    ),
    Case(
        name="SW415-storage-dims",
        layout=mine("fsdp: {elsewhere: fsdp, weights: [embed, mlp]}", "{fsdp: auto}"),
        options=TORCH,
        neighbour={"options": JAX},
    ),
    Case(
        name="SW415-storage-dim-by-a-rule",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {mlp: {embed: [fsdp]}}\n"),
        options=TORCH,
        neighbour={"options": JAX},
    ),
    Case(
        name="SW415-chips",
        model="llama3-8b",
        layout="fsdp",
        options={**TORCH, "chip": read_machine("v5p:2x2x2").chip},
        neighbour={"options": {**TORCH, "chip": read_machine("h100:1x8").chip}},
    ),
)

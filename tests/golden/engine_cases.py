"""The cases of what an engine does not run: each kind under that engine, and a similar request that it runs."""

from __future__ import annotations

from shardwright.core.model.optimizer import Optimizer
from shardwright.core.recipes.presets import preset
from shardwright.cost import read_machine
from tests.golden.findings_case import Case, mine

TORCH, JAX = {"engine": "torch", "devices": 8}, {"engine": "jax", "devices": 8}
ON_TORCH = {"mesh_sizes": {"stage": 2}, "engine": "torch"}
STAGED = {"devices": 8, "microbatches": 2, "batch": 16}
TWO_TENSOR = "a: tensor\nb: tensor"
ENDS_OF_ITS_OWN = mine("fsdp: fsdp\ntensor: {elsewhere: tensor, logits: idle}", "{fsdp: auto, tensor: 2}")

ON_ENGINES: tuple[Case, ...] = (
    Case(
        name="SW415-circular",
        layout="pp",
        options={**STAGED, **ON_TORCH, "schedule": "circular"},
        neighbour={"options": {**STAGED, **ON_TORCH, "schedule": "1f1b"}},
    ),
    Case(
        name="SW415-halves-computed-again",
        layout="pp",
        options={**STAGED, **ON_TORCH, "schedule": "zero-bubble", "remat": "dots"},
        neighbour={"options": {**STAGED, **ON_TORCH, "schedule": "zero-bubble", "remat": "none"}},
    ),
    Case(
        name="SW415-recipe-in-stages",
        layout="pp",
        options={**STAGED, **ON_TORCH, "precision": preset("fp8-row")},
        neighbour={"options": {**STAGED, **ON_TORCH}},
    ),
    Case(
        name="SW415-tied-in-stages",
        model="llama3-test tied=true",
        layout=mine("x: stage\nfsdp: {elsewhere: fsdp, logits: data}", "{x: 2, fsdp: auto}"),
        options={**STAGED, "engine": "torch"},
        neighbour={"layout": mine("x: stage\nfsdp: fsdp", "{x: 2, fsdp: auto}")},
    ),
    Case(
        name="SW415-schedule",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "schedule": "1f1b"},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "schedule": "circular"}},
    ),
    Case(
        name="SW415-schedule-of-a-layout",
        layout=mine("x: {elsewhere: stage, schedule: gpipe}\nfsdp: fsdp", "{x: 2, fsdp: auto}"),
        options=STAGED,
        neighbour={"layout": mine("x: {elsewhere: stage, schedule: circular}\nfsdp: fsdp", "{x: 2, fsdp: auto}")},
    ),
    Case(
        name="SW415-saved-in-stages",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "remat": "dots"},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "remat": "full"}},
    ),
    Case(
        name="SW415-precision-in-stages",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "precision": preset("fp8-row")},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}}},
    ),
    Case(
        name="SW415-padding-and-optimizers",
        layout="pp",
        model="llama3-test",
        options={**STAGED, "mesh_sizes": {"stage": 4}, "optimizer": Optimizer(name="optax:adafactor")},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "optimizer": Optimizer(name="optax:adafactor")}},
    ),
    Case(
        name="SW415-ring-in-stages",
        layout=mine("x: stage\nfsdp: fsdp\ncp: context", "{x: 2, fsdp: auto, cp: 2}", "move: {attention: ring}\n"),
        options=STAGED,
        neighbour={
            "layout": mine(
                "x: stage\nfsdp: fsdp\ncp: context", "{x: 2, fsdp: auto, cp: 2}", "move: {attention: gather}\n"
            )
        },
    ),
    Case(
        name="SW415-ends-of-all-stages",
        layout=mine("fsdp: fsdp\nx: {elsewhere: stage, embedding: fsdp, logits: tensor}", "{fsdp: auto, x: 2}"),
        options=STAGED,
        neighbour={"layout": mine("fsdp: fsdp\nx: stage", "{fsdp: auto, x: 2}")},
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
        name="SW415-updates-beside-stages",
        layout=mine(
            "data: {elsewhere: data, optimizer: shard, gradients: shard}\nstage: stage", "{data: auto, stage: 2}"
        ),
        options={**STAGED, "mesh_sizes": {"stage": 2}},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 1}}},
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

"""The cases of what an engine does not run: each kind under that engine, and a similar request that it runs."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.model.optimizer import Optimizer
from shardwright.core.recipes.presets import preset
from shardwright.cost import read_machine
from tests.golden.findings_case import Case, mine

TORCH, JAX = {"engine": "torch", "devices": 8}, {"engine": "jax", "devices": 8}
ON_TORCH = {"mesh_sizes": {"stage": 2}, "engine": "torch"}
STAGED = {"devices": 8, "microbatches": 2, "batch": 16}
CODES = replace(preset("fp8-row"), gather_quantized=True)
TWO_TENSOR = "a: tensor\nb: tensor"
ENDS_OF_ITS_OWN = mine("fsdp: fsdp\ntensor: {elsewhere: tensor, logits: idle}", "{fsdp: auto, tensor: 2}")
ZERO2_IN_STAGES = mine(
    "data: {elsewhere: data, optimizer: shard, gradients: shard}\nstage: stage", "{data: auto, stage: 2}"
)

ON_ENGINES: tuple[Case, ...] = (
    Case(
        name="SW415-window",
        model="mixtral-test window=64",
        layout="ep",
        options={**JAX, "length": 128},
        neighbour={"options": {**JAX, "length": 64}},
    ),
    Case(
        name="SW415-quantized-logits-in-chunks",
        layout=mine("fsdp: fsdp", "{fsdp: auto}"),
        options={**JAX, "loss_chunks": 4, "precision": replace(preset("fp8-row"), quantized=("logits.kernel",))},
        neighbour={"options": {**JAX, "loss_chunks": 4, "precision": preset("fp8-row")}},
    ),
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
        name="SW415-policy",
        layout="pp",
        options={**STAGED, **ON_TORCH, "schedule": "1f1b", "remat": "keep=attention.attended,mlp.gate@0:1+dots"},
        neighbour={"options": {**STAGED, **ON_TORCH, "schedule": "1f1b", "remat": "dots"}},
    ),
    Case(
        name="SW415-codes-in-stages",
        layout="pp",
        options={**STAGED, **ON_TORCH, "schedule": "zero-bubble", "precision": CODES},
        neighbour={"options": {**STAGED, **ON_TORCH, "schedule": "1f1b", "precision": CODES}},
    ),
    Case(
        name="SW415-scattered-in-stages",
        layout=ZERO2_IN_STAGES,
        options={**STAGED, **ON_TORCH, "schedule": "zero-bubble"},
        neighbour={"options": {**STAGED, **ON_TORCH, "schedule": "1f1b"}},
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
        name="SW415-hosted-in-stages",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "remat": "dots,host=mlp.gate"},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "remat": "dots"}},
    ),
    Case(
        name="SW415-weights-of-microbatches",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "remat": "keep=weights"},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "remat": "none"}},
    ),
    Case(
        name="SW415-some-layers-in-stages",
        layout="pp",
        options={**STAGED, "mesh_sizes": {"stage": 2}, "remat": "dots@0:4+full"},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "remat": "dots@layers+full"}},
    ),
    Case(
        name="SW415-ring-in-stages",
        layout=mine("x: stage\ncp: context\nfsdp: fsdp", "{x: 2, cp: 2, fsdp: auto}", "move: {attention: ring}\n"),
        options={**STAGED, "remat": "dots"},
        neighbour={"options": {**STAGED, "remat": "full"}},
    ),
    Case(
        name="SW415-padding-and-optimizers",
        layout="pp",
        model="llama3-test",
        options={**STAGED, "mesh_sizes": {"stage": 4}, "optimizer": Optimizer(name="optax:adafactor")},
        neighbour={"options": {**STAGED, "mesh_sizes": {"stage": 2}, "optimizer": Optimizer(name="optax:adafactor")}},
    ),
    Case(
        name="SW415-updates-beside-stages",
        layout=ZERO2_IN_STAGES,
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
        layout=mine("fsdp: {elsewhere: fsdp, weights: [embed, mlp]}\nmore: fsdp", "{fsdp: 2, more: auto}"),
        options=TORCH,
        neighbour={"options": JAX},
    ),
    Case(
        name="SW415-storage-dim-by-a-rule",
        model="llama3-test mlp=510",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {mlp: {mlp: [fsdp]}}\n"),
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

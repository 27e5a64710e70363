"""Where a state is saved and loaded: models, engines, layouts and meshes. No framework is loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import ml_dtypes
import numpy as np

from shardwright.cli.typed.values import mesh_sizes, settings
from shardwright.core.boxes.box import Box
from shardwright.core.engines.engines import Engine
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build
from tests.sameness.own_layouts import own_layout

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
ENGINES: tuple[Engine, Engine] = ("jax", "torch")
BATCH, LENGTH = 168, 24
"""Multiples of all sizes of meshes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model with odd dims. ``layouts``: of each its name, its mesh on JAX and its mesh on PyTorch, None where the engine
    does not train it. ``delayed``: its state has factors and histories of delayed amaxes."""

    settings: str
    weights_dtype: str = "float32"
    delayed: bool = False
    layouts: tuple[tuple[str, str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A model under a layout on an engine."""

    model: str
    engine: Engine
    layout: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.model} {self.engine} {self.layout} {self.mesh}"


MODELS: Mapping[str, Model] = {
    # Latent attention, a dense layer, experts with a shared one, and a buffer: the bias of the router.
    "deepseek3-test": Model(
        settings="num_layers=3,embed=48,num_heads=4,q_lora=24,kv_lora=24,nope_dim=6,rope_dim=4,value_dim=7,mlp=102,"
        "expert_mlp=46,num_experts=8,num_groups=2,num_chosen_groups=1,top_k=2,vocab=257",
        layouts=(
            ("fsdp", "fsdp=1", "fsdp=1"),
            ("ddp", "data=8", "data=4"),
            ("fsdp", "fsdp=8", "fsdp=4"),
            ("fsdp", "fsdp=3", "fsdp=3"),
            ("hsdp", "data=2,fsdp=4", "data=2,fsdp=2"),
            ("tp", "data=4,tensor=2", "data=2,tensor=2"),
            ("fsdp-tp", "fsdp=4,tensor=2", "fsdp=2,tensor=2"),
            ("fsdp-tp", "fsdp=3,tensor=2", "fsdp=1,tensor=2"),
            ("cp", "fsdp=2,context=4", "fsdp=2,context=2"),
            ("ep", "fsdp=2,expert=4", "fsdp=2,expert=2"),
            ("ep-as-cp", "fsdp=4,expert=2", "fsdp=2,expert=2"),
            ("ep-as-dp", "fsdp=2,expert=4", "fsdp=1,expert=4"),
            ("cp-as-ep", "fsdp=2,context=2,expert=2", "fsdp=1,context=2,expert=2"),
            ("tp-as-ep", "fsdp=3,tensor=2", "fsdp=2,tensor=2"),
            ("shard-exp-on-fsdp", "fsdp=2,expert=4", "fsdp=2,expert=2"),
            ("fsdp-as-dp-for-attn", "fsdp=4,expert=2", "fsdp=2,expert=2"),
            ("cp-tp", "fsdp=2,context=2,tensor=2", "fsdp=1,context=2,tensor=2"),
            ("cp-ep", "fsdp=2,context=2,expert=2", "fsdp=1,context=2,expert=2"),
            ("ep-tp", "fsdp=2,expert=2,tensor=2", "fsdp=1,expert=2,tensor=2"),
            ("ep-as-cp-tp", "fsdp=2,expert=2,tensor=2", "fsdp=1,expert=2,tensor=2"),
            ("vocabulary-stored-by-rule", "fsdp=8", "fsdp=4"),
        ),
    ),
    # Dense, with a tied embedding.
    "llama3-test": Model(
        settings="num_layers=3,embed=48,num_heads=4,num_kv_heads=4,head_dim=10,mlp=108,vocab=257,tied=true",
        layouts=(
            ("fsdp", "fsdp=1", "fsdp=1"),
            ("ddp", "data=8", "data=4"),
            ("fsdp", "fsdp=8", "fsdp=4"),
            ("fsdp", "fsdp=6", "fsdp=3"),
            ("hsdp", "data=4,fsdp=2", "data=2,fsdp=2"),
            ("tp", "data=1,tensor=4", "data=2,tensor=2"),
            ("fsdp-tp", "fsdp=2,tensor=4", "fsdp=2,tensor=2"),
            ("fsdp-tp", "fsdp=3,tensor=2", "fsdp=1,tensor=4"),
            ("cp", "fsdp=2,context=4", "fsdp=1,context=4"),
            ("cp-tp", "fsdp=2,context=2,tensor=2", "fsdp=1,context=2,tensor=2"),
            ("tp-whole-rows", "fsdp=4,tensor=2", "fsdp=2,tensor=2"),
            ("tp-whole-keys", "fsdp=2,tensor=4", "fsdp=1,tensor=4"),
            ("vocabulary-stored-by-rule", "fsdp=8", "fsdp=4"),
            ("vocabulary-of-the-logits", "fsdp=2,tensor=4", None),
        ),
    ),
    # Experts over three devices, weights in another dtype than their moments, and a factor and a history of each expert's operands.
    "mixtral-test": Model(
        settings="num_layers=2,embed=42,num_heads=6,num_kv_heads=3,head_dim=6,mlp=54,num_experts=6,vocab=101",
        weights_dtype="bfloat16",
        delayed=True,
        layouts=(
            ("fsdp", "fsdp=1", "fsdp=1"),
            ("fsdp", "fsdp=7", "fsdp=4"),
            ("hsdp", "data=3,fsdp=2", "data=2,fsdp=2"),
            ("ep", "fsdp=2,expert=3", "fsdp=1,expert=3"),
            ("ep-as-cp", "fsdp=3,expert=2", "fsdp=2,expert=2"),
            ("shard-exp-on-fsdp", "fsdp=2,expert=3", "fsdp=1,expert=3"),
            ("fsdp-as-dp-for-attn", "fsdp=2,expert=3", "fsdp=2,expert=2"),
            ("tp", "data=2,tensor=3", "data=1,tensor=3"),
        ),
    ),
    # Updates that are sharded in another way than the weights: moments have boxes of their own.
    "llama3-1b": Model(
        settings="num_layers=2,embed=48,num_heads=4,num_kv_heads=4,head_dim=10,mlp=102,vocab=257",
        layouts=(
            ("fsdp", "fsdp=1", "fsdp=1"),
            ("fsdp-tp", "fsdp=3,tensor=2", "fsdp=2,tensor=2"),
            ("zero1", "data=8", "data=3"),
            ("zero2", "data=4", "data=4"),
            ("hsdp-zero1", "data=2,fsdp=3", "data=2,fsdp=2"),
            ("hsdp-zero2", "data=2,fsdp=4", "data=3,fsdp=1"),
            ("zero-tp", "data=2,replica=2,tensor=2", "data=2,replica=2,tensor=1"),
        ),
    ),
}


def places(model: str) -> tuple[Place, ...]:
    """Every layout of a model, on JAX and then on PyTorch."""
    return tuple(
        Place(model=model, engine=engine, layout=layout, mesh=mesh)
        for number, engine in enumerate(ENGINES)
        for layout, *meshes in MODELS[model].layouts
        if (mesh := meshes[number]) is not None
    )


@cache
def plan_of(place: Place) -> Plan:
    model = MODELS[place.model]
    plan = make_plan(
        Request(
            layout=load_layout(place.layout) if place.layout in preset_names() else own_layout(place.layout),
            table=build(place.model, settings([[model.settings]])),
            batch=BATCH,
            length=LENGTH,
            mesh_sizes=mesh_sizes(place.mesh),
            engine=place.engine,
            weights_dtype=model.weights_dtype,
            precision=preset("fp8-delayed", amax_history_len=3) if model.delayed else None,
        )
    )
    assert not plan.errors, (str(place), plan.errors)
    return plan


@cache
def values_of(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values of a tensor of the state: random bits, NaNs among them, which its name decides."""
    known = np.dtype(DTYPES[dtype])
    count = int(np.prod(shape, dtype=int)) * known.itemsize
    array = np.frombuffer(np.random.default_rng(crc32(name.encode())).bytes(count), known).reshape(shape)
    array.flags.writeable = False
    return array


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same elements as integers, which compare bit for bit."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def uneven_weights(plan: Plan) -> int:
    """Of how many weights the devices save shards of several sizes."""
    sizes: dict[str, set[tuple[int, ...]]] = {}
    counts: dict[str, int] = {}
    for device in range(plan.mesh.num_devices):
        shards: dict[str, list[Box]] = {}
        for found in saved_boxes(plan, device):
            shards.setdefault(found.weight, []).append(found.box)
        for weight, boxes in shards.items():
            sizes.setdefault(weight, set()).add((sum(box.size for box in boxes),))
            counts[weight] = counts.get(weight, 0) + 1
    return sum(len(sizes[weight]) > 1 or counts[weight] < plan.mesh.num_devices for weight in sizes)

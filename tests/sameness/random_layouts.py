"""Random layouts for models of the smallest sizes: drawn by number, and drawn again where the planner refuses one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import yaml

from shardwright.core.engines.engines import Engine
from shardwright.core.findings.errors import ShardwrightError
from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.policies.policy import BASES
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.token_hops import TWO_HOPS
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.engine_jax.made_rows import LENGTH

ROWS, VOCAB = 8, 128
DTYPES = ("float32", "bfloat16")

GROUPED = "num_layers=1,embed=32,num_heads=8,head_dim=4,mlp=32"
MIXTRAL = f"{GROUPED},num_kv_heads=4,num_experts=8"
DEEPSEEK = (
    "num_layers=2,embed=32,num_heads=4,q_lora=16,kv_lora=8,nope_dim=8,rope_dim=8,value_dim=8,mlp=32,expert_mlp=16,"
    "num_experts=8,num_groups=2,num_chosen_groups=1,top_k=2"
)


class Model(NamedTuple):
    """A model of the smallest size, and the seed of its initial values: with this seed no token of the steps is near to
    a tie between two experts."""

    name: str
    dimensions: str
    seed: int = 0

    @property
    def table(self) -> ModelTable:
        dimensions = dict(one.split("=") for one in self.dimensions.split(","))
        return build(self.name, {**dimensions, "vocab": str(VOCAB)})

    def of(self, dtype: str) -> Model:
        """The model for a dtype: in bfloat16, every token is assigned to all experts (``bounds.py``)."""
        return self if dtype == DTYPES[0] else self._replace(dimensions=self.dimensions + EVERY_EXPERT[self.name])


MODELS = {
    "llama3": (
        Model("llama3-test", f"{GROUPED},num_kv_heads=8"),
        Model("llama3-test", f"{GROUPED},num_kv_heads=4,tied=true"),
        Model("llama3-test", f"{GROUPED},num_kv_heads=2"),
    ),
    "mixtral": (Model("mixtral-test", MIXTRAL), Model("mixtral-test", f"{MIXTRAL},capacity_factor=1.0")),
    "deepseek3": (Model("deepseek3-test", DEEPSEEK), Model("deepseek3-test", f"{DEEPSEEK},capacity_factor=1.0")),
}

ENGINES: tuple[Engine, ...] = ("jax", "torch")

EVERY_EXPERT = {
    "llama3-test": "",
    "mixtral-test": ",top_k=8",
    "deepseek3-test": ",top_k=8,num_groups=1,num_chosen_groups=1",
}

AXES = ("a", "b", "c", "d")
SIZES: dict[int, Sequence[tuple[int, ...]]] = {
    2: ((2, 2), (2, 2), (2, 4), (4, 2), (8, 1), (2, 1)),
    3: ((2, 2, 2), (2, 2, 2), (2, 2, 1), (2, 4, 1), (4, 2, 1)),
    4: ((2, 2, 2, 1), (2, 2, 2, 2)),
}
"""Sizes of the axes by their number, in any order."""

MOSTLY = ("data", "fsdp", "fsdp", "context", "context", "context", "tensor", "tensor", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The layout of a number. ``refused``: the finding codes or errors of the layouts that were drawn before it and refused."""

    number: int
    family: str
    model: Model
    plan: Plan
    refused: Counter[str]

    @property
    def engine(self) -> Engine:
        return self.plan.request.engine

    @property
    def dtype(self) -> str:
        return self.plan.request.dtype

    @property
    def text(self) -> str:
        """Everything that is needed to reproduce it."""
        request, plan = self.plan.request, self.plan
        layout = request.layout
        entries = {
            axis: {
                "roles": dict(entry.roles),
                "weights": entry.weights,
                "sequence_parallel": entry.sequence_parallel,
            }
            for axis, entry in layout.entries.items()
        }
        return (
            f"{self.engine} {self.model} {plan.mesh}, attention {layout.move_attention}, moe {layout.move_moe}, "
            f"{request.microbatches} microbatches, remat {request.remat}, head-tail {request.load_balanced}, {entries}, "
            f"rules {[(rule.component, rule.logical_axis, rule.axes) for rule in layout.rules]}"
        )

    @property
    def in_another_order(self) -> bool:
        """Whether a tensor has a dim whose axes are not in mesh order."""
        mesh = self.plan.mesh
        specs = [spec for row in self.plan.tensors for spec in (row.at_rest, row.in_use) if spec is not None]
        every = [mesh.larger_than_one(dim.axes) for spec in specs for dim in spec.dims]
        return any(axes != mesh.in_mesh_order(axes) for axes in every)

    @property
    def alone(self) -> Plan:
        """The same model, rows and dtype on one device."""
        layout = read_layout(parse_yaml("name: alone\nmesh: {a: 1}\nroles: {a: data}\n", "alone.yaml"))
        one = replace(self.plan.request, layout=layout, microbatches=1, load_balanced=False, remat="none")
        plan = make_plan(one)
        assert not plan.errors, plan.errors
        return plan


def draw(seed: int, number: int, *, most: Mapping[str, int], dtype: str = "float32") -> Drawn:
    """The layout of a number under a seed. ``most``: the largest number of devices of each engine.

    In bfloat16 the layout is the same, and every token is assigned to all experts of its model.
    """
    dice = random.Random(f"{seed} {number}")
    engine = ENGINES[number % 2]
    refused: Counter[str] = Counter()
    family = dice.choice(list(MODELS))
    while True:
        model = dice.choice(MODELS[family]).of(dtype)
        found = _plan(dice, model, engine, most[engine], dtype)
        if isinstance(found, Plan):
            return Drawn(number=number, family=family, model=model, plan=found, refused=refused)
        refused[found] += 1


def _plan(dice: random.Random, model: Model, engine: Engine, most: int, dtype: str) -> Plan | str:
    """A plan without errors that the engine runs, or the code or error by which it is refused."""
    table = model.table
    text = yaml.safe_dump(random_layout(dice, table, most), sort_keys=False)
    microbatches, balanced = dice.choice((1, 1, 2)), dice.random() < 0.3
    remat = dice.choice(("none", "none", *BASES))
    try:
        layout = read_layout(parse_yaml(text, "random.yaml"))
        request = Request(
            layout=layout,
            table=table,
            batch=ROWS,
            length=LENGTH,
            engine=engine,
            dtype=dtype,
            remat=remat,
            microbatches=microbatches,
            load_balanced=balanced,
        )
        plan = make_plan(request)
    except ShardwrightError as error:
        findings = getattr(error, "findings", ())
        return findings[0].code if findings else str(error)
    return plan.errors[0].code if plan.errors else plan


def random_layout(dice: random.Random, table: ModelTable, most: int) -> dict[str, Any]:
    """A layout as in a file, with axes and entries in any order."""
    num = dice.choice([one for one in (2, 2, 3, 3, 3, 4, 4) if any(prod(shape) <= most for shape in SIZES[one])])
    shapes = [shape for shape in SIZES[num] if prod(shape) <= most]
    names, sizes = dice.sample(AXES, num), dice.sample(shape := dice.choice(shapes), len(shape))
    often = dice.choice((0.0, 0.1, 0.1, 0.3))
    roles = {axis: _entry(dice, table, often) for axis in dice.sample(names, num)}
    layout: dict[str, Any] = {
        "name": "random",
        "mesh": dict(zip(names, sizes, strict=True)),
        "roles": roles,
        "move": {
            "attention": dice.choice(ATTENTION_MOVES),
            "moe": dice.choice([move for move in MOE_MOVES if move not in ("auto", TWO_HOPS)]),
        },
    }
    if dice.random() < 0.25:
        weight = dice.choice([one for one in table.weights if not one.frozen])
        axes = dice.sample(names, dice.randint(0, num))
        layout["rules"] = {weight.component: {dice.choice(weight.logical_axes): axes}}
    if layout["move"]["moe"] == "all-to-all" and random.Random(str(layout)).random() < 0.5:
        # Drawn apart, so that the other layouts stay as they were.
        layout["move"]["moe"] = TWO_HOPS
    return layout


def _entry(dice: random.Random, table: ModelTable, often: float) -> dict[str, Any]:
    """The roles of an axis; ``often``: the probability that a component has a role of its own."""
    elsewhere = dice.choice(MOSTLY)
    entry: dict[str, Any] = {"elsewhere": elsewhere}
    if "moe" in table.components and dice.random() < 0.6:
        entry["moe"] = "expert"
    for component in COMPONENTS:
        if component not in entry and dice.random() < often:
            entry[component] = dice.choice([role for role in MOSTLY if component in ROLES[role].components])
    if entry.get("residual", elsewhere) == "tensor" and dice.random() < 0.6:
        entry["sequence_parallel"] = True
    if any(ROLES[role].stores for name, role in entry.items() if name != "sequence_parallel"):
        kind = dice.random()
        if kind < 0.15:
            entry["weights"] = "whole"
        elif kind < 0.25:
            entry["weights"] = [dice.choice(dice.choice(table.weights).logical_axes)]
    return entry

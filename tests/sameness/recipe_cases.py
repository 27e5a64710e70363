"""The layouts and recipes that are compared with one device in low precision. Recipes are data: a new one that an engine runs is
one more here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.engines.engines import Engine
from shardwright.core.findings.errors import FindingsError
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build
from tests.engine_jax.steps import recipe_of

LLAMA3, MIXTRAL = "llama3-test", "mixtral-test"
ROWS, LENGTH, VOCAB = 8, 32, 64
WIDTHS = "num_layers=1,embed=128,num_heads=8,num_kv_heads=8,head_dim=32"
SIZES = {LLAMA3: f"{WIDTHS},mlp=256", MIXTRAL: f"{WIDTHS},mlp=128,num_experts=4,top_k=4"}
"""Shards of `tensor` 2 end with a block of 128. Every token is assigned to all experts, so that no last bit changes an expert."""

RENAMED = "{mesh: {north: 2, east: 2, up: 2}, roles: {north: data, east: fsdp, up: {elsewhere: tensor, sequence_parallel: true}}, name: renamed}"
"""`fsdp-tp` on axes of other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCase:
    """A model under a layout with a recipe. ``recipe``: as ``recipe_text`` has it. ``layout``: a preset, or ``renamed``."""

    recipe: str
    model: str
    layout: str
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.sizes)
        return f"{self.recipe} {self.model} {self.layout} {sizes}"

    @property
    def devices(self) -> int:
        found = 1
        for _, size in self.sizes:
            found *= size
        return found

    @property
    def alone(self) -> RecipeCase:
        """One device."""
        return replace(self, layout="fsdp", sizes=(("fsdp", 1),))


def case(recipe: str, model: str, layout: str, /, **sizes: int) -> RecipeCase:
    return RecipeCase(recipe=recipe, model=model, layout=layout, sizes=tuple(sizes.items()))


def every_case() -> list[RecipeCase]:
    """Every recipe that an engine runs under every layout, and tokens that are sent as codes where experts are sharded."""
    found: list[RecipeCase] = []
    for name in PRESETS:
        found += [
            case(name, LLAMA3, "fsdp", fsdp=4),
            case(name, LLAMA3, "hsdp", data=2, fsdp=2),
            case(name, LLAMA3, "fsdp-tp", fsdp=2, tensor=2),
            case(name, LLAMA3, "renamed", north=2, east=2, up=2),
            case(name, MIXTRAL, "ep", fsdp=2, expert=2),
            case(name, MIXTRAL, "ep-as-cp", fsdp=2, expert=2),
        ]
    found += [case("mxfp8 dispatch_quantized=1", MIXTRAL, layout, fsdp=2, expert=2) for layout in ("ep", "ep-as-cp")]
    return [one for one in found if runs(one)]


def runs(one: RecipeCase) -> bool:
    try:
        plan = make_plan(request_of(one, "torch"))
    except FindingsError:
        return False
    return "SW415" not in {finding.code for finding in plan.errors}


def layout_of(name: str) -> Layout:
    return load_layout(name) if name in preset_names() else read_layout(parse_yaml(RENAMED, "renamed.yaml"))


def request_of(one: RecipeCase, engine: Engine, **options: object) -> Request:
    each = (setting.partition("=") for setting in SIZES[one.model].split(","))
    settings: Mapping[str, str] = {name: value for name, _, value in each}
    return Request(
        layout=layout_of(one.layout),
        table=build(one.model, {**settings, "vocab": str(VOCAB)}),
        batch=ROWS,
        length=LENGTH,
        mesh_sizes=dict(one.sizes),
        engine=engine,
        remat="none",
        precision=recipe_of(one.recipe),
        **options,  # pyright: ignore[reportArgumentType]
    )


def plan_of(one: RecipeCase, engine: Engine, **options: object) -> Plan:
    plan = make_plan(request_of(one, engine, **options))
    assert not plan.errors, plan.errors
    return plan

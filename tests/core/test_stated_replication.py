"""Replication that a layout states explicitly is information: never an error, whatever it costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.core.engines.engines import Engine
from shardwright.core.layout.layout import Layout, Rule
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.role_reading import roles_everywhere
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build

TP = """
name: replicated-keys
mesh: {fsdp: 2, tensor: 8}
roles: {fsdp: fsdp, tensor: tensor}
rules: {attention: {kv_heads: []}}
"""


def planned(layout: Layout, table: ModelTable, engine: Engine = "jax", **sizes: int) -> Plan:
    return make_plan(Request(layout=layout, table=table, batch=16, length=128, engine=engine, mesh_sizes=sizes))


@pytest.mark.parametrize("engine", ["jax", "torch"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
def test_key_heads_that_a_rule_replicates(kv_heads, engine) -> None:
    """As docs/rules.md describes it for more devices than KV heads."""
    table = build("llama3-8b", {"num_layers": "2", "num_heads": "24", "num_kv_heads": str(kv_heads)})
    plan = planned(read_layout(parse_yaml(TP, "mine.yaml")), table, engine)
    assert not plan.errors
    assert not [f for f in plan.findings if f.severity == "warning" and f.code == "SW101"]
    for name in ("layers.attention.k", "layers.attention.v"):
        assert "tensor" not in plan.by_name[name].spec.axes


def variants(layout: Layout, table: ModelTable) -> Iterator[tuple[str, Layout]]:
    """Each replication that a layout may state, as a text and the layout with it."""
    dims = {(w.component, name) for w in table.weights for name in w.logical_axes if w.storage or len(w.shape) > 1}
    for component, name in sorted(dims):
        rule = Rule(component=component, logical_axis=name, axes=())
        yield f"{component} {name}: []", replace(layout, rules=(*layout.rules, rule))
    for axis, entry in layout.entries.items():
        if any(ROLES[role].stores for role in entry.roles.values()):
            replicated = replace(entry, weights="whole")
            yield f"{axis} weights: whole", replace(layout, entries={**layout.entries, axis: replicated})
        for component in COMPONENTS:
            # An entire layer is on one stage, and an axis with role expert alone shards nothing outside the experts.
            if entry.roles[component] not in ("idle", "stage"):
                named = {c: entry.roles[c] for c in entry.declared} | {component: "idle"}
                roles = roles_everywhere(named, entry.elsewhere, sequence_parallel=entry.sequence_parallel)
                idle = replace(entry, roles=roles, declared=frozenset(named))
                yield f"{axis} idle in {component}", replace(layout, entries={**layout.entries, axis: idle})


DRAWN = 60
MODELS = ("llama3-test", "mixtral-test", "deepseek3-test")


def test_stated_replication_is_no_error() -> None:
    """In layouts that have no error without it."""
    draw = random.Random(11)
    tables = {model: build(model) for model in MODELS}
    sound: dict[tuple[str, str, Engine], bool] = {}
    errors: list[str] = []
    for _ in range(DRAWN):
        model, preset = draw.choice(MODELS), draw.choice(preset_names())
        engine: Engine = "jax" if draw.random() < 0.5 else "torch"
        layout = load_layout(preset)
        layout = replace(layout, mesh={axis: replace(entry, size=2) for axis, entry in layout.mesh.items()})
        key = (model, preset, engine)
        if key not in sound:
            sound[key] = not planned(layout, tables[model], engine).errors
        what, changed = draw.choice(list(variants(layout, tables[model])))
        if sound[key]:
            errors += [f"{what}, {key}: {f.code} {f.found}" for f in planned(changed, tables[model], engine).errors]
    assert not errors
    assert sum(sound.values()) > DRAWN / 4


def test_a_rule_that_names_axes_and_omits_one_is_a_warning() -> None:
    """One axis missing from one rule cost a public model 2.6 times its step time (MaxText #4005)."""
    layout = replace(load_layout("ep"), rules=(Rule(component="attention", logical_axis="embed", axes=("data",)),))
    for fsdp in (1, 2):
        found = list(planned(layout, build("mixtral-test"), data=1, fsdp=fsdp, expert=4).findings)
        assert [f.severity for f in found if f.code == "SW101" and "leaves the axis out" in f.found] == ["warning"]

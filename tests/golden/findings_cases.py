"""Requests that break one law each, a neighbour of each that does not, and where the whole text of the finding is kept.

A new or changed text is written by ``python -m tests.golden.regenerate_findings``. Read the diff before you commit it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwright import FindingsError, make_plan
from shardwright.core.finding import Finding
from shardwright.core.layout import Layout
from shardwright.core.layout_reading import read_layout
from shardwright.core.request import Chip, Request
from shardwright.core.table import Activation, ModelTable
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout
from shardwright.models import build

FOLDER = Path(__file__).parent / "findings"
V5E = Chip(name="v5e", usable_bytes=int(15.75 * 2**30), source="libtpu 0.0.42.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request that triggers a code. ``layout`` is a preset's name or the text of a file; ``neighbour`` replaces fields."""

    name: str
    model: str = "llama3-test"
    layout: str
    neighbour: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    """A change of the model's table, by its name in TABLES."""

    @property
    def code(self) -> str:
        return self.name.split("-")[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    def beside(self) -> Case:
        return replace(self, **self.neighbour)


def fused_heads(table: ModelTable) -> ModelTable:
    """With a weight and an activation that have heads and KV heads in one tensor."""
    query = table.weight("layers.attention.q")
    fused = replace(
        query,
        name="layers.attention.qk",
        logical_axes=("embed", "heads", "kv_heads"),
        shape=(256, 16, 16),
        torch_dims=None,
    )
    scores = Activation(
        name="attention.scores", component="attention", logical_axes=("batch", "heads", "kv_heads"), num=6
    )
    return replace(table, weights=(*table.weights, fused), activations=(*table.activations, scores))


def odd_latent(table: ModelTable) -> ModelTable:
    """With an activation whose hidden units no weight has: 6 of them."""
    side = Activation(
        name="mlp.side", component="mlp", logical_axes=("batch", "length", "mlp"), sizes={"mlp": 6}, num=6
    )
    return replace(table, activations=(*table.activations, side))


def empty_router(table: ModelTable) -> ModelTable:
    """With a router that nothing cuts: one weight over experts alone, as if tokens never met it."""
    weight = replace(
        table.weights[1], name="router.table", component="logits", logical_axes=("norm",), shape=(256,), storage=()
    )
    kept = tuple(a for a in table.activations if a.component != "logits")
    weights = tuple(w for w in table.weights if w.component != "logits")
    return replace(table, weights=(*weights, weight), activations=kept)


TABLES = {"": lambda table: table, "fused": fused_heads, "odd": odd_latent, "bare": empty_router}


def mine(roles: str, mesh: str = "{data: 1, fsdp: auto, expert: 4}", rest: str = "") -> str:
    """A layout of one's own, each entry on a line of its own."""
    entries = "".join(f"  {line}\n" for line in roles.split("\n"))
    return f"name: mine\nmesh: {mesh}\nroles:\n{entries}{rest}"


EP = "data: data\nfsdp: fsdp\nexpert: {elsewhere: fsdp, moe: expert}"
FSDP = mine("fsdp: fsdp", "{fsdp: auto}")
EIGHT = {"devices": 8}

CASES: tuple[Case, ...] = (
    Case(
        name="SW101-weights-no-axis-cuts",
        layout=mine("fsdp: {elsewhere: fsdp, weights: whole}", "{fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW101-weights-left-out-by-a-rule",
        model="mixtral-test",
        layout=mine(EP, rest="rules: {attention: {embed: [fsdp]}}\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP)},
    ),
    Case(
        name="SW101-weights-kept-whole",
        model="mixtral-test",
        layout=mine("data: data\nfsdp: {elsewhere: fsdp, weights: whole}\nexpert: {elsewhere: fsdp, moe: expert}"),
        options=EIGHT,
        neighbour={"layout": mine(EP)},
    ),
    Case(
        name="SW101-tensor-has-no-dim",
        model="deepseek3-test",
        layout="fsdp-tp",
        options=EIGHT,
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 1}}},
    ),
    Case(
        name="SW101-replicas",
        model="llama3-8b",
        layout="hsdp",
        options={"devices": 16},
        neighbour={"options": {"devices": 16, "mesh_sizes": {"data": 1}}},
    ),
    Case(
        name="SW101-replicas-in-one-component",
        model="mixtral-test",
        layout="ep-as-dp",
        options=EIGHT,
        neighbour={"layout": "ep"},
    ),
    Case(
        name="SW101-activations",
        model="mixtral-test",
        layout=mine("expert: {elsewhere: idle, moe: expert}", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}", "{expert: 4}")},
    ),
    Case(
        name="SW102-by-a-rule",
        model="mixtral-test",
        layout=mine(EP, rest="rules:\n  moe:\n    embed: [expert]\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP, rest="rules:\n  moe:\n    embed: [fsdp]\n")},
    ),
    Case(
        name="SW102-by-the-role-table",
        layout="tp",
        table="fused",
        options={"devices": 4},
        neighbour={"table": ""},
    ),
    Case(
        name="SW102-twice-in-a-rule",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {embed: [fsdp, fsdp]}}\n"),
        neighbour={"layout": mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {embed: [fsdp]}}\n")},
    ),
    Case(
        name="SW103-cuts-nothing",
        layout=mine("data: data\nfsdp: fsdp\nexpert: {elsewhere: idle, moe: expert}"),
        options=EIGHT,
        neighbour={"model": "mixtral-test"},
    ),
    Case(
        name="SW103-nothing-in-one-component",
        layout=FSDP,
        table="bare",
        options=EIGHT,
        neighbour={"table": ""},
    ),
    Case(
        name="SW103-residual-repeated",
        layout=mine("fsdp: fsdp\ntensor: tensor", "{fsdp: auto, tensor: 2}"),
        options=EIGHT,
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW103-ends-repeated-by-stages",
        layout="pp",
        options={"devices": 8, "micro_steps": 2},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"stage": 1}}},
    ),
    Case(
        name="SW104-padded",
        layout="fsdp-tp",
        table="odd",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 2}}},
    ),
    Case(
        name="SW104-uneven-parts",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "mesh_sizes": {"expert": 8}, "engine": "torch"},
        neighbour={"options": {"devices": 64, "mesh_sizes": {"expert": 8}, "engine": "torch"}},
    ),
    Case(
        name="SW104-unloadable",
        model="llama3-test mlp=770",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}, "engine": "torch"},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW105-auto",
        model="mixtral-8x7b",
        layout=mine(EP, rest="move: {moe: auto}\n"),
        options=EIGHT,
        neighbour={"layout": mine(EP, rest="move: {moe: ring}\n")},
    ),
    Case(
        name="SW106-product",
        layout="hsdp",
        options={"devices": 12, "mesh_sizes": {"data": 2, "fsdp": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"data": 2, "fsdp": 4}}},
    ),
    Case(
        name="SW106-does-not-divide",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 3}},
        neighbour={"options": EIGHT},
    ),
    Case(
        name="SW106-auto-twice",
        layout=mine("data: data\nfsdp: fsdp", "{data: auto, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("data: data\nfsdp: fsdp", "{data: 1, fsdp: auto}")},
    ),
    Case(
        name="SW106-below-one",
        layout="hsdp",
        options={"devices": 8, "mesh_sizes": {"data": 0}},
        neighbour={"options": EIGHT},
    ),
    Case(
        name="SW106-size-in-the-file",
        layout=mine("data: data\nfsdp: fsdp", "{data: two, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("data: data\nfsdp: fsdp", "{data: 2, fsdp: auto}")},
    ),
    Case(name="SW106-natural-devices", layout="fsdp", neighbour={"options": EIGHT}),
    Case(
        name="SW107-kv-heads",
        model="llama3-8b",
        layout="fsdp-tp",
        options={"devices": 32, "mesh_sizes": {"tensor": 16}},
        neighbour={"options": {"devices": 32, "mesh_sizes": {"tensor": 8}}},
    ),
    Case(
        name="SW107-kv-heads-as-pytorch-stores-them",
        model="llama3-8b",
        layout="fsdp-tp",
        options={"devices": 32, "mesh_sizes": {"tensor": 16}, "engine": "torch"},
        neighbour={"options": {"devices": 32, "mesh_sizes": {"tensor": 8}, "engine": "torch"}},
    ),
    Case(
        name="SW107-experts",
        model="mixtral-8x7b",
        layout="ep",
        options={"devices": 16, "batch": 16, "mesh_sizes": {"expert": 16}},
        neighbour={"options": {"devices": 16, "batch": 16, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW107-hidden-units",
        model="llama3-test mlp=770",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensor": 4}},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW108-fewer-rows-than-devices",
        model="mixtral-8x7b",
        layout="ep",
        options={"devices": 16, "batch": 8, "mesh_sizes": {"expert": 8}},
        neighbour={"layout": "ep-as-cp"},
    ),
    Case(
        name="SW108-rows",
        layout="fsdp",
        options={"devices": 8, "batch": 12},
        neighbour={"options": {"devices": 8, "batch": 16}},
    ),
    Case(
        name="SW108-micro-steps",
        layout="fsdp",
        options={"devices": 8, "batch": 16, "micro_steps": 4},
        neighbour={"options": {"devices": 8, "batch": 16, "micro_steps": 2}},
    ),
    Case(
        name="SW108-tokens",
        layout="cp",
        options={"devices": 8, "length": 129},
        neighbour={"options": {"devices": 8, "length": 130}},
    ),
    Case(
        name="SW108-tokens-balanced",
        layout="cp",
        options={"devices": 8, "length": 130, "load_balanced": True},
        neighbour={"options": {"devices": 8, "length": 132, "load_balanced": True}},
    ),
    Case(
        name="SW110-layers",
        layout="pp",
        options={"devices": 8, "mesh_sizes": {"stage": 4}, "micro_steps": 4, "batch": 16},
        neighbour={"options": {"devices": 6, "mesh_sizes": {"stage": 3}, "micro_steps": 4, "batch": 16}},
    ),
    Case(
        name="SW110-micro-steps",
        model="llama3-8b",
        layout="pp",
        options={"devices": 16},
        neighbour={"options": {"devices": 16, "micro_steps": 2}},
    ),
    Case(
        name="SW111-axis",
        layout="fsdp-tp",
        options={"devices": 8, "mesh_sizes": {"tensorr": 4}},
        neighbour={"options": {"devices": 8, "mesh_sizes": {"tensor": 4}}},
    ),
    Case(
        name="SW111-axis-in-the-file",
        layout=mine("fsdp: fsdp\nfsbp: data", "{fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(name="SW111-role", layout=mine("fsdp: fspd", "{fsdp: auto}"), neighbour={"layout": FSDP}),
    Case(
        name="SW111-component",
        layout=mine("fsdp: {elsewhere: fsdp, atention: data}", "{fsdp: auto}"),
        neighbour={"layout": mine("fsdp: {elsewhere: fsdp, attention: data}", "{fsdp: auto}")},
    ),
    Case(
        name="SW111-logical-axis",
        layout=mine("fsdp: {elsewhere: fsdp, weights: [mpl]}", "{fsdp: auto}"),
        neighbour={"layout": mine("fsdp: {elsewhere: fsdp, weights: [mlp]}", "{fsdp: auto}")},
    ),
    Case(
        name="SW111-kept-for-later",
        layout=mine("fsdp: {elsewhere: fsdp, gradients: sharded}", "{fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW111-ulysses",
        layout=mine("context: context", "{context: auto}", "move: {attention: ulysses}\n"),
        neighbour={"layout": mine("context: context", "{context: auto}", "move: {attention: ring}\n")},
    ),
    Case(
        name="SW111-unused-rule",
        layout=mine("fsdp: fsdp", "{fsdp: auto}", "rules: {attention: {q_lora: [fsdp]}}\n"),
        options=EIGHT,
        neighbour={"model": "deepseek3-test"},
    ),
    Case(
        name="SW111-unused-weights",
        layout="shard-exp-on-fsdp",
        options=EIGHT,
        neighbour={"model": "mixtral-test"},
    ),
    Case(
        name="SW114-q-lora",
        model="deepseek3-671b",
        layout="ep",
        options={"devices": 2048, "batch": 2048, "mesh_sizes": {"expert": 8}},
        neighbour={"layout": "ep-as-dp", "options": {"devices": 1024, "batch": 1024, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW114-one-element-left",
        model="deepseek3-671b",
        layout="ep",
        options={"devices": 512, "batch": 512, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 128, "batch": 128, "mesh_sizes": {"expert": 8}}},
    ),
    Case(
        name="SW117-mesh-order",
        model="mixtral-test",
        layout=mine("expert: {elsewhere: fsdp, moe: expert}\nfsdp: fsdp", "{expert: 4, fsdp: auto}"),
        options=EIGHT,
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}\nfsdp: fsdp", "{fsdp: auto, expert: 4}")},
    ),
    Case(
        name="SW118-another-dim",
        model="llama3-test embed=264",
        layout="fsdp",
        options={"devices": 16, "batch": 16},
        neighbour={"model": "llama3-test"},
    ),
    Case(
        name="SW119-stage-in-logits",
        layout=mine("stage: {elsewhere: stage, logits: stage}", "{stage: 2}"),
        neighbour={"layout": mine("stage: {elsewhere: stage, logits: idle}", "{stage: 2}")},
    ),
    Case(
        name="SW119-expert-outside-moe",
        layout=mine("expert: expert", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: fsdp, moe: expert}", "{expert: 4}")},
    ),
    Case(
        name="SW119-option-without-its-role",
        layout=mine("data: {elsewhere: data, sequence_parallel: true, weights: whole}", "{data: auto}"),
        neighbour={"layout": mine("data: data", "{data: auto}")},
    ),
    Case(name="SW120-no-layout", layout="[fsdp]\n", neighbour={"layout": FSDP}),
    Case(name="SW120-nothing-in-it", layout="name: mine\n", neighbour={"layout": FSDP}),
    Case(
        name="SW120-axis-without-roles",
        layout=mine("fsdp: fsdp", "{data: 1, fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW120-component-without-role",
        layout=mine("expert: {moe: expert, attention: fsdp}", "{expert: 4}"),
        neighbour={"layout": mine("expert: {elsewhere: idle, moe: expert, attention: fsdp}", "{expert: 4}")},
    ),
    Case(
        name="SW121-fewer-rows-than-devices",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "batch": 64, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 1, "batch": 64, "mesh_sizes": {"expert": 1}}},
    ),
    Case(
        name="SW121-a-row-for-each-device",
        model="deepseek3-671b",
        layout="ep-as-cp",
        options={"devices": 128, "batch": 128, "mesh_sizes": {"expert": 8}},
        neighbour={"options": {"devices": 1, "batch": 128, "mesh_sizes": {"expert": 1}}},
    ),
    Case(
        name="SW121-replicas",
        model="llama3-8b",
        layout="hsdp",
        options={"devices": 16},
        neighbour={"options": {"devices": 1, "mesh_sizes": {"data": 1}}},
    ),
    Case(
        name="SW121-stages",
        model="llama3-8b",
        layout="pp",
        options={"devices": 16, "micro_steps": 2},
        neighbour={"options": {"devices": 1, "mesh_sizes": {"stage": 1}}},
    ),
    Case(
        name="SW312-too-much",
        model="llama3-8b",
        layout="ddp",
        options={"devices": 16, "length": 4096, "chip": V5E},
        neighbour={"options": {"devices": 16, "length": 4096}},
    ),
    Case(
        name="SW312-recomputing-more-would-do",
        model="llama3-8b",
        layout="fsdp",
        options={"devices": 64, "batch": 64, "length": 4096, "remat": "none", "chip": V5E},
        neighbour={"options": {"devices": 64, "batch": 64, "length": 4096, "remat": "full", "chip": V5E}},
    ),
)


@cache
def layout_of(text: str) -> Layout:
    return read_layout(parse_yaml(text, "mine.yaml")) if "\n" in text else load_layout(text)


@cache
def table_of(model: str, change: str) -> ModelTable:
    name, *settings = model.split()
    return TABLES[change](build(name, dict(setting.split("=") for setting in settings)))


def request(case: Case) -> Request:
    """Raises FindingsError for a layout that cannot be read."""
    table = table_of(case.model, case.table)
    options = {"batch": table.natural_batch, "length": table.natural_length, "dtype": table.dtype, **case.options}
    return Request(layout=layout_of(case.layout), table=table, **options)


def findings(case: Case) -> tuple[Finding, ...]:
    """Every finding of a case, as a user would meet them: those of the reading, of the mesh, or of the plan."""
    try:
        return make_plan(request(case)).findings
    except FindingsError as error:
        return error.findings


def of_its_code(case: Case) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings(case) if finding.code == case.code)


def golden_text(case: Case) -> str:
    return "\n\n".join(finding.text() for finding in of_its_code(case)) + "\n"

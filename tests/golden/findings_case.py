"""A request that violates a law, a similar request that does not, and the golden file with the full text of the finding.

A new or changed text is written by ``python -m tests.golden.regenerate_findings``. Read the diff before you commit it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwright import FindingsError, make_plan
from shardwright import table_of as own_table
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.model.table import Activation, ModelTable
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.search.neighbours import with_faster_neighbour

FOLDER = Path(__file__).parent / "findings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request that triggers a code. ``layout`` is a preset's name or the text of a file; ``neighbour`` replaces fields."""

    name: str
    model: str = "llama3-test"
    layout: str
    neighbour: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    """A change of the model's table: its name in TABLES."""
    chips: str = ""
    """The chips for the cost of the plan, as in ``--chips``."""

    @property
    def code(self) -> str:
        return self.name.split("-")[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    def similar(self) -> Case:
        return replace(self, **self.neighbour)


def fused_heads(table: ModelTable) -> ModelTable:
    """Adds a weight and an activation that have heads and KV heads in one tensor."""
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
    """Adds an activation with 6 hidden units, a size that no weight has."""
    side = Activation(
        name="mlp.side", component="mlp", logical_axes=("batch", "length", "mlp"), sizes={"mlp": 6}, num=6
    )
    return replace(table, activations=(*table.activations, side))


def empty_router(table: ModelTable) -> ModelTable:
    """With a router that no axis shards: one weight with only the dim of experts, as if no token used it."""
    weight = replace(
        table.weights[1], name="router.table", component="logits", logical_axes=("norm",), shape=(256,), storage=()
    )
    kept = tuple(a for a in table.activations if a.component != "logits")
    weights = tuple(w for w in table.weights if w.component != "logits")
    return replace(table, weights=(*weights, weight), activations=kept)


def own_qkv(table: ModelTable) -> ModelTable:
    """A user's attention with q, k and v in one weight, whatever the model was."""
    del table
    shapes = {"blocks.0.qkv.weight": ((192, 64), "float32"), "blocks.0.out.weight": ((64, 64), "float32")}
    names = {"*.qkv.weight": "attention: heads embed", "*.out.weight": "attention: embed heads"}
    return own_table(shapes, names, units={"heads": 16})


TABLES = {"qkv": own_qkv, "": lambda table: table, "fused": fused_heads, "odd": odd_latent, "bare": empty_router}


EP = "data: data\nfsdp: fsdp\nexpert: {elsewhere: fsdp, moe: expert}"
IN_NODES = f"{EP}\nnode: {{elsewhere: fsdp, moe: expert}}"
"""Roles of layouts with experts, over one axis and over two."""


def mine(roles: str, mesh: str = "{data: 1, fsdp: auto, expert: 4}", rest: str = "") -> str:
    """The text of a user's layout, each entry on its own line."""
    entries = "".join(f"  {line}\n" for line in roles.split("\n"))
    return f"name: mine\nmesh: {mesh}\nroles:\n{entries}{rest}"


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
    named = case.options.get("precision")
    recipe = {"precision": preset(named)} if isinstance(named, str) else {}
    optimizer = {"optimizer": ADAMW} if case.options.get("optimizer") == ADAMW.name else {}
    options = {
        "batch": table.natural_batch,
        "length": table.natural_length,
        "dtype": table.dtype,
        **case.options,
        **recipe,
        **optimizer,
    }
    if case.chips:
        machine = read_machine(case.chips)
        options |= {"devices": machine.num_devices, "chip": machine.chip}
    return Request(layout=layout_of(case.layout), table=table, **options)


def findings(case: Case) -> tuple[Finding, ...]:
    """Every finding of a case, as a user gets them: those of the reading, of the mesh, or of the plan. Several tests ask for each."""
    text = repr(case)
    if text not in _FOUND:
        _FOUND[text] = _found(case)
    return _FOUND[text]


_FOUND: dict[str, tuple[Finding, ...]] = {}


def _found(case: Case) -> tuple[Finding, ...]:
    try:
        plan = make_plan(request(case))
        if not case.chips:
            return plan.findings
        machine = read_machine(case.chips)
        priced = price(plan, machine)
        return (with_faster_neighbour(priced, machine) if case.code == "SW208" else priced).findings
    except FindingsError as error:
        return error.findings


def of_its_code(case: Case) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings(case) if finding.code == case.code)


def golden_text(case: Case) -> str:
    return "\n\n".join(finding.text() for finding in of_its_code(case)) + "\n"

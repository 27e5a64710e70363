"""The resolved layouts with golden files: which they are, their paths, and how to make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwright import Plan, Request, load_layout, make_plan, preset_names
from shardwright.models import build, names

FOLDER = Path(__file__).parent / "layouts"
TEST_SIZE_DEVICES = 8


def cases() -> Iterator[tuple[str, str]]:
    """(preset, model): every preset for every family at its test size, full-size models under their natural preset."""
    for model in names():
        if model.endswith("-test"):
            yield from ((preset, model) for preset in preset_names())
        else:
            yield build(model).natural_layout, model


def request(preset: str, model: str) -> Request:
    table = build(model)
    assert table.natural_batch is not None
    assert table.natural_length is not None
    small = model.endswith("-test")
    return Request(
        layout=load_layout(preset),
        table=table,
        batch=table.natural_batch,
        length=table.natural_length,
        mesh_sizes={} if small else dict(table.natural_mesh or {}),
        devices=TEST_SIZE_DEVICES if small else None,
        dtype=table.dtype,
    )


def golden_text(plan: Plan) -> str:
    """The dump of a plan, below a line with its model, layout and mesh."""
    return f"# {plan.request.table.name} under {plan.request.layout.name} on {plan.mesh}\n{plan.dump()}"


def path_of(preset: str, model: str) -> Path:
    return FOLDER / preset / f"{model}.txt"


def make(preset: str, model: str) -> Plan:
    return make_plan(request(preset, model))

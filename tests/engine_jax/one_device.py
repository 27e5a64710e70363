"""The links of a model on one device, where nothing is communicated."""

from __future__ import annotations

from shardwright import make_plan
from shardwright.core.model.table import ModelTable
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.layer_io import Links
from shardwright.engine_jax.lowering.links import links_of
from shardwright.layouts import load_layout


def one_device_links(table: ModelTable, *, batch: int, length: int, dtype: str = "float32") -> Links:
    """The links of a step with ``batch`` rows of ``length`` tokens."""
    layout = load_layout("ddp")
    return links_of(
        make_plan(Request(layout=layout, table=table, batch=batch, length=length, dtype=dtype, mesh_sizes={"data": 1}))
    )

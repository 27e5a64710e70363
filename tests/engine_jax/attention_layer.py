"""Attention of one layer on eight devices and on one: its output, and every gradient.

B rows, L tokens, M embed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.attention_kernels import ChosenKernel
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.layer_io import Links
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.updates import reduced
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.engine_jax.one_device import one_device_links
from tests.engine_jax.part_of_layer import added_by_part
from tests.models.random_weights import random_weights

ROWS, LENGTH, EMBED = 2, 32, 32

MODELS = {
    "grouped": ("llama3-test", {"num_layers": "1", "num_heads": "8", "num_kv_heads": "4", "head_dim": "8"}),
    "uneven KV heads": ("llama3-test", {"num_layers": "1", "num_heads": "6", "num_kv_heads": "3", "head_dim": "8"}),
    "few KV heads": ("llama3-test", {"num_layers": "1", "num_heads": "8", "num_kv_heads": "2", "head_dim": "8"}),
    "latent": (
        "deepseek3-test",
        {"num_layers": "1", "num_dense_layers": "1", "num_heads": "8", "nope_dim": "8", "rope_dim": "4"},
    ),
}
"""Few layers, narrow heads, and never as many KV heads as heads."""

DOCUMENTS = ((13, 4, 15), (7, 20))
"""Lengths of the documents of each row; the rest of the row is padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of ``MODELS`` under a layout, a preset or the text of one. ``mesh`` gives sizes to the axes of a preset.

    ``way``: the kernel, if it is not the plan's choice for simulated devices. ``longer``: a factor of the lengths of a row
    and of its documents.
    """

    model: str
    layout: str
    mesh: tuple[tuple[str, int], ...] = ()
    balanced: bool = False
    dtype: str = "float32"
    way: ChosenKernel | None = None
    longer: int = 1


@cache
def table_of(model: str) -> ModelTable:
    name, sizes = MODELS[model]
    return build(name, {**sizes, "embed": str(EMBED)})


@cache
def plan_of(case: Case) -> Plan:
    """The plan of a case, which has no errors."""
    read = read_layout(parse_yaml(case.layout, "mine.yaml")) if "\n" in case.layout else load_layout(case.layout)
    plan = make_plan(
        Request(
            layout=read,
            table=table_of(case.model),
            batch=ROWS,
            length=case.longer * LENGTH,
            mesh_sizes=dict(case.mesh),
            load_balanced=case.balanced,
            dtype=case.dtype,
        )
    )
    assert not plan.errors, plan.errors
    return plan


@cache
def batch(longer: int = 1) -> Mapping[str, np.ndarray]:
    """The stream, the weights of its loss, and the position and segment of each token: documents, then padding."""
    rng, length = np.random.default_rng(0), longer * LENGTH
    positions_BL, segments_BL = (np.zeros((ROWS, length), np.int32) for _ in range(2))
    for row, lengths in enumerate(DOCUMENTS):
        starts = longer * np.cumsum((0, *lengths))
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], length], strict=True), 1):
            positions_BL[row, start:stop] = np.arange(stop - start)
            segments_BL[row, start:stop] = number if number <= len(lengths) else 0
    return {
        "stream": rng.normal(size=(ROWS, length, EMBED)).astype(np.float32),
        "loss_weights": rng.normal(size=(ROWS, length, EMBED)).astype(np.float32),
        "positions": positions_BL,
        "segments": segments_BL,
    }


@cache
def weights_of(model: str) -> Mapping[str, np.ndarray]:
    """The attention weights of the first layer, by their names in the table."""
    table = table_of(model)
    stack = table.architecture.stacks[0].name
    return {name: array[0] for name, array in random_weights(table).items() if name.startswith(f"{stack}.attention.")}


def output_and_gradients(weights, arrays, table: ModelTable, links: Links):
    """The output of attention, and the gradients of its weighted sum with respect to the stream and the weights."""

    def loss(stream, weights):
        used = {name.split(".", 1)[1]: links.use(name, weight) for name, weight in weights.items()}
        stack = table.architecture.stacks[0].name
        part = ("attention.input", "attention.projected")
        added, _ = added_by_part(*part, stream, arrays, used, table, links, stack)
        return jnp.sum(jnp.sin(added) * arrays["loss_weights"]), added

    (_, added), cotangents = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(arrays["stream"], weights)
    return added, cotangents


@cache
def on_one_device(model: str, longer: int = 1):
    table, arrays = table_of(model), batch(longer)
    rows, length = arrays["positions"].shape
    links = one_device_links(table, batch=rows, length=length)
    run = jax.jit(lambda weights, arrays: output_and_gradients(weights, arrays, table, links))
    return jax.tree.map(np.asarray, run(weights_of(model), arrays))


@cache
def program_of(case: Case):
    """The same on the mesh of a case, one program per device, jitted; it takes and gives global arrays."""
    plan = plan_of(case)
    links, rows = links_of(plan), plan.by_name
    if case.way is not None:
        links = replace(links, attention=replace(links.attention, kernel=case.way))
    specs = {name: _partition(rows[name].at_rest) for name in weights_of(case.model)}
    tokens, stream = _partition(rows["input.tokens"].in_use), _partition(rows["residual.stream"].in_use)
    fields = {"stream": stream, "loss_weights": stream, "positions": tokens, "segments": tokens}

    def on_device(weights, arrays):
        added, (of_stream, of_weights) = output_and_gradients(weights, arrays, plan.request.table, links)
        summed = {name: reduced(plan, name, g) for name, g in of_weights.items()}
        return added, (of_stream, summed)

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=device_mesh(plan.mesh),
            in_specs=(specs, fields),
            out_specs=(stream, (stream, specs)),
            check_vma=False,
        )
    )


def _partition(spec: Spec | None) -> PartitionSpec:
    assert spec is not None
    return PartitionSpec(*(dim.axes or None for dim in spec.dims))

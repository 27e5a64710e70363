"""Changes that MaxText makes to any configuration with pipeline stages."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.mesh.mesh import Mesh
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.rules import Rule

ROWS = "activation_embed_and_logits_batch"
ROWS_AXES = ("stage", "data", "fsdp", "fsdp_transpose", "expert")
"""The axes that replace those of the first rule for the rows of embedding and logits."""


def with_stages_first(configuration: Configuration, mesh: Mesh) -> tuple[Configuration, Mesh]:
    """``stage`` and ``data`` are swapped where ``data`` is first, and the first rule for ROWS is replaced."""
    names = list(mesh.names)
    if "data" in names and names.index("stage") > names.index("data"):
        data, stage = names.index("data"), names.index("stage")
        axes = list(mesh.axes)
        axes[data], axes[stage] = axes[stage], axes[data]
        mesh = Mesh(tuple(axes))
    rules = list(configuration.rules)
    first = next((number for number, line in enumerate(rules) if line.name == ROWS), None)
    if first is not None:
        rules[first] = Rule(name=ROWS, axes=ROWS_AXES, position=rules[first].position)
    return replace(configuration, rules=tuple(rules)), mesh

"""What MaxText changes of a configuration once it has pipeline stages, whatever its files say."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.mesh.mesh import Mesh
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.rules import Rule

ROWS = "activation_embed_and_logits_batch"
ROWS_AXES = ("stage", "data", "fsdp", "fsdp_transpose", "expert")
"""What the first line for the rows of embedding and logits says then, whatever it said."""


def with_stages_first(configuration: Configuration, mesh: Mesh) -> tuple[Configuration, Mesh]:
    """``stage`` and ``data`` change places where ``data`` is the earlier one, and the first line for ROWS is another."""
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

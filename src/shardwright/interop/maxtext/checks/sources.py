"""SW112: values of one source that another silently replaces."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.merging import OVERRIDE
from shardwright.interop.maxtext.resolution.placement import Imported, larger


def rules_hidden(imported: Imported) -> Iterator[Drafted]:
    """Rules given together with a preset, which replaces the full list."""
    for hidden in imported.configuration.hidden:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where=f"rules given together with the preset {hidden.by.source}",
                position=hidden.position,
                found=f"{hidden.what} have no effect: the preset's list ({hidden.by.source}:{hidden.by.line}) "
                "replaces all rules after every other source is read",
                needed="either a preset or your own rules",
                fix="Add the rules to a copy of the preset's file.",
            )
        )


def rules_overridden(imported: Imported) -> Iterator[Drafted]:
    """An override that leaves no rule."""
    scalar = imported.configuration.settings.get(OVERRIDE)
    if scalar is not None and scalar.value is True and not imported.rules:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where=f"'{OVERRIDE}'",
                position=scalar.position,
                found="it removes every rule of the earlier sources, and its own source has none: all tensors are replicated",
                needed="rules in the source that overrides",
                fix=f"Take '{OVERRIDE}' out.",
            )
        )


def context_axis_disagrees(imported: Imported) -> Iterator[Drafted]:
    """An explicit ``context_sharding`` that is not the axis with which the rules shard tokens."""
    configuration = imported.configuration
    line = next((line for line in imported.rules if line.name == "activation_length"), None)
    from_rules = line.axes[0] if line is not None and line.axes else None
    preset = configuration.preset
    scalar = configuration.settings.get("context_sharding")
    if preset is not None and "context_sharding" in preset.settings:
        scalar = preset.settings["context_sharding"]
    if scalar is None or line is None:
        return
    if preset is not None:
        if from_rules is not None and from_rules != scalar.value:
            yield Draft(
                finding=Finding(
                    code="SW112",
                    severity="error",
                    where="'context_sharding'",
                    position=scalar.position,
                    found=f"'{scalar.value}' is overwritten with '{from_rules}', the first axis that the preset's rule for "
                    f"'activation_length' ({line.position.source}:{line.position.line}) names",
                    needed="one of the two",
                    fix=f"Write 'context_sharding: {from_rules}'.",
                )
            )
        return
    sharding = larger(line.axes, imported.mesh)
    if sharding and scalar.value not in sharding:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where="'context_sharding'",
                position=scalar.position,
                found=f"rows are reordered and masked as if '{scalar.value}' sharded them, and the rule for 'activation_length' "
                f"({line.line}) shards them over {product(imported.mesh, sharding)}",
                needed="the axis that shards tokens",
                fix=f"Write 'context_sharding: {sharding[0]}'.",
            )
        )

"""SW112: what one source says and another replaces, unsaid."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.merging import OVERRIDE
from shardwright.interop.maxtext.resolution.placing import Imported, larger


def rules_hidden(imported: Imported) -> Iterator[Drafted]:
    """Rules given together with a preset, which replaces the whole list."""
    for hidden in imported.configuration.hidden:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where=f"rules given together with the preset {hidden.by.source}",
                position=hidden.position,
                found=f"{hidden.what} have no effect: the preset's list ({hidden.by.source}:{hidden.by.line}) "
                "replaces all rules after every other source was read",
                needed="either a preset or rules of one's own",
                fix="Add the rules to a copy of the preset's file.",
            )
        )


def rules_overridden(imported: Imported) -> Iterator[Drafted]:
    """An override that leaves no rule at all."""
    word = imported.configuration.settings.get(OVERRIDE)
    if word is not None and word.value is True and not imported.rules:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where=f"'{OVERRIDE}'",
                position=word.position,
                found="every rule of the sources before it is thrown away, and none stands beside it: all tensors are whole",
                needed="rules in the source that overrides",
                fix=f"Take '{OVERRIDE}' out.",
            )
        )


def context_axis_disagrees(imported: Imported) -> Iterator[Drafted]:
    """An explicit ``context_sharding`` and the axis that the rules cut tokens by."""
    configuration = imported.configuration
    line = next((line for line in imported.rules if line.name == "activation_length"), None)
    from_rules = line.axes[0] if line is not None and line.axes else None
    preset = configuration.preset
    word = configuration.settings.get("context_sharding")
    if preset is not None and "context_sharding" in preset.settings:
        word = preset.settings["context_sharding"]
    if word is None or line is None:
        return
    if preset is not None:
        if from_rules is not None and from_rules != word.value:
            yield Draft(
                finding=Finding(
                    code="SW112",
                    severity="error",
                    where="'context_sharding'",
                    position=word.position,
                    found=f"'{word.value}' is overwritten with '{from_rules}', the first axis that the preset's rule for "
                    f"'activation_length' ({line.position.source}:{line.position.line}) names",
                    needed="one of the two",
                    fix=f"Write 'context_sharding: {from_rules}'.",
                )
            )
        return
    cuts = larger(line.axes, imported.mesh)
    if cuts and word.value not in cuts:
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                where="'context_sharding'",
                position=word.position,
                found=f"rows are reordered and masked as if '{word.value}' cut them, and the rule for 'activation_length' "
                f"({line.line}) cuts them over {product(imported.mesh, cuts)}",
                needed="the axis that cuts tokens",
                fix=f"Write 'context_sharding: {cuts[0]}'.",
            )
        )

"""SW112: values of one source that another silently replaces, and a ``context_sharding`` that differs from the rules."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.codes import Severity
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.layout.wording import either, product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.merging import OVERRIDE
from shardwright.interop.maxtext.reading.reading import GIVEN
from shardwright.interop.maxtext.reading.vocabulary import CONTEXT, CONTEXT_AXES
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
    """A ``context_sharding`` that is not the axis with which the rules shard tokens. With a preset MaxText takes it from its rules."""
    configuration = imported.configuration
    scalar = configuration.settings.get(CONTEXT)
    line = next((line for line in imported.rules if line.name == "activation_length"), None)
    if configuration.preset is not None and line is not None and line.axes:
        if scalar is not None and scalar.position.source == GIVEN and scalar.value != line.axes[0]:
            yield _disagrees(
                scalar.position,
                f"'{scalar.value}' is replaced with '{line.axes[0]}', the first axis that the preset's rule for 'activation_length' "
                f"({line.position.source}:{line.position.line}) names",
                "nothing: a preset says it",
                f"Take '{CONTEXT}' out.",
                severity="warning",
            )
        return
    if scalar is None and not configuration.settings:
        return  # A preset's file alone, whose rules MaxText reads the axis from.
    axis = CONTEXT_AXES[0] if scalar is None else str(scalar.value)
    if axis not in CONTEXT_AXES:
        return
    sharding = larger(line.axes, imported.mesh) if line is not None else ()
    counted = imported.mesh.shape.get(axis, 1) > 1
    if axis in sharding or not (sharding or counted or (scalar is not None and line is not None and line.axes)):
        return
    if not sharding and not counted and line is not None and axis in line.axes:
        return
    of_rule = "" if line is None else f" ({line.line})"
    right = [other for other in CONTEXT_AXES if line is not None and other in (sharding or line.axes)]
    if sharding:
        how = f"the rule for 'activation_length'{of_rule} shards them over {product(imported.mesh, sharding)}"
    elif counted:
        how = f"no rule for 'activation_length' shards them over '{axis}', of size {imported.mesh.shape[axis]}"
    else:
        how = f"the rule for 'activation_length'{of_rule} names {either(line.axes if line else ())}, of size 1 here"
    stated = "" if scalar is not None else f", MaxText's '{CONTEXT}' where no file has one,"
    place = line.position if scalar is None and line is not None else None if scalar is None else scalar.position
    yield _disagrees(
        place or configuration.rules_from,
        f"rows are reordered and masked as if '{axis}'{stated} sharded them, and {how}",
        "the axis that shards tokens: " + either(CONTEXT_AXES),
        f"Write '{CONTEXT}: {right[0]}'." if right and scalar is not None else "",
        severity="error" if sharding or counted else "warning",
    )


def context_axis_unknown(imported: Imported) -> Iterator[Drafted]:
    """SW111: a ``context_sharding`` with which MaxText does not start. A preset's rule replaces it first."""
    configuration = imported.configuration
    scalar = configuration.settings.get(CONTEXT)
    line = next((line for line in imported.rules if line.name == "activation_length"), None)
    if configuration.preset is not None and line is not None and line.axes:
        return
    if scalar is not None and scalar.value not in CONTEXT_AXES:
        named = [axis for axis in CONTEXT_AXES if line is not None and axis in line.axes]
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="error",
                where=f"'{CONTEXT}'",
                position=scalar.position,
                found=f"'{scalar.value}', with which MaxText does not start",
                needed=either(CONTEXT_AXES),
                fix=f"Write '{CONTEXT}: {(named or CONTEXT_AXES)[0]}'.",
            )
        )


def _disagrees(place: Position | None, found: str, needed: str, fix: str, *, severity: Severity) -> Drafted:
    return Draft(
        finding=Finding(
            code="SW112",
            severity=severity,
            where=f"'{CONTEXT}'",
            position=place,
            found=found,
            needed=needed,
            fix=fix,
        )
    )

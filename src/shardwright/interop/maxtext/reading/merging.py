"""Several files merged into one configuration as MaxText merges them, with a record of what the merge hides.

| source | rules | other keys |
|---|---|---|
| ``base_config`` of a file | the full list is replaced | replaced |
| base, then the file, then the model's own, then the command line | rules of a name that is stated again are deleted, and the new ones appended; all are deleted where the later source sets ``override_logical_axis_rules: true`` | replaced |
| a preset (``custom_mesh_and_rule``), after all of these | the full list is replaced, with ``mesh_axes`` and ``data_sharding`` | kept |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.findings.position import Position
from shardwright.interop.maxtext.reading.reading import RULES, RuleFile, Scalar
from shardwright.interop.maxtext.reading.rules import Rule, Rules, names_of

OVERRIDE = "override_logical_axis_rules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restated:
    """A name whose rules a later source states again. ``kept``: the list if the new rules were in the place of the old ones."""

    name: str
    old: tuple[Rule, ...]
    new: tuple[Rule, ...]
    kept: tuple[Rule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A value of an earlier source that a later one silently replaces in full."""

    what: str
    position: Position
    by: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The merged configuration. ``rules_from``: the position of the key whose list of rules applies."""

    sources: tuple[str, ...]
    mesh_axes: tuple[Scalar, ...]
    rules: tuple[Rule, ...]
    eval_rules: tuple[Rule, ...] = ()
    data_sharding: tuple[Scalar, ...] = ()
    sizes: Mapping[str, Scalar] = field(default_factory=dict)
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    restated: tuple[Restated, ...] = ()
    hidden: tuple[Hidden, ...] = ()
    preset: RuleFile | None = None
    rules_from: Position | None = None
    not_read: Mapping[str, Position] = field(default_factory=dict)
    """Keys from which nothing here follows, with the last position of each."""
    subject: str = ""
    """The file that defines the model: the model's own, or the imported one."""
    model_file: str | None = None
    """MaxText's own file of the model, where it is one of the sources."""
    replaced: Mapping[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    """Values on the model that the model's own file silently replaces: by key, the old value and the new."""
    base: str | None = None
    """The file that this was merged into by default: the ``base.yml`` of the configs folder."""

    def value_of(self, key: str) -> str | int | float | bool | None:
        """The value of a setting; None where no source has it."""
        scalar = self.settings.get(key)
        return None if scalar is None else scalar.value


def extended(base: RuleFile, file: RuleFile) -> RuleFile:
    """A file merged over its ``base_config``: each of its keys replaces that of the base; lists are replaced in full."""
    return RuleFile(
        source=file.source,
        mesh_axes=base.mesh_axes if file.mesh_axes is None else file.mesh_axes,
        rules=base.rules if file.rules is None else file.rules,
        eval_rules=base.eval_rules if file.eval_rules is None else file.eval_rules,
        data_sharding=base.data_sharding if file.data_sharding is None else file.data_sharding,
        sizes={**base.sizes, **file.sizes},
        settings={**base.settings, **file.settings},
        positions={**base.positions, **file.positions},
        not_read={**base.not_read, **file.not_read},
    )


def merged(
    layers: Sequence[RuleFile], preset: RuleFile | None = None, eval_preset: RuleFile | None = None
) -> Configuration:
    """The configuration of base, file and command line, in that order, and then a preset's.

    ``eval_preset``: its rules are for evaluation; without one, evaluation uses those of training.
    """
    rules = layers[0].rules or ()
    for layer in layers[1:]:
        rules = _with(rules, layer)
    hidden: list[Hidden] = []
    restated = _restated(layers)
    given = [layer for layer in layers if layer.rules is not None]
    mesh_axes = _last(layers, "mesh_axes")
    data = _last(layers, "data_sharding")
    place = given[-1].positions[RULES] if given else None
    if preset is not None:
        # A preset is meant to replace the rules of a complete base, which has a mesh. Rules of other sources were meant to apply.
        for layer in given:
            if preset.rules is not None and (layer is not layers[0] or layer.mesh_axes is None):
                hidden.append(_hidden(layer, preset))
        if preset.rules is not None:
            rules, restated, place = preset.rules, (), preset.positions[RULES]
        mesh_axes = mesh_axes if preset.mesh_axes is None else preset.mesh_axes
        data = data if preset.data_sharding is None else preset.data_sharding
    own_eval = _last(layers, "eval_rules")
    return Configuration(
        sources=tuple(each.source for each in (*layers, preset, eval_preset) if each is not None),
        mesh_axes=mesh_axes,
        rules=rules,
        eval_rules=own_eval if eval_preset is None else eval_preset.rules or (),
        data_sharding=data,
        sizes={key: scalar for layer in layers for key, scalar in layer.sizes.items()},
        settings={key: scalar for layer in layers for key, scalar in layer.settings.items()},
        restated=restated,
        hidden=tuple(hidden),
        preset=preset,
        rules_from=place,
        not_read={key: place for layer in layers for key, place in layer.not_read.items()},
        subject=layers[-1].source,
    )


def _with(rules: tuple[Rule, ...], layer: RuleFile) -> tuple[Rule, ...]:
    """The list after merging one more source. One that overrides may leave it empty."""
    new = layer.rules or ()
    if _overrides(layer):
        return new
    names = set(names_of(new))
    return (*(line for line in rules if line.name not in names), *new)


def _overrides(layer: RuleFile) -> bool:
    scalar = layer.settings.get(OVERRIDE)
    return scalar is not None and scalar.value is True


def _restated(layers: Sequence[RuleFile]) -> tuple[Restated, ...]:
    """Every name that was stated again, with the list if its rules had kept their place."""
    found = []
    before: tuple[Rule, ...] = ()
    for number, layer in enumerate(layers):
        if number and layer.rules and not _overrides(layer):
            for name in names_of(layer.rules):
                old = tuple(line for line in before if line.name == name)
                if not old:
                    continue
                new = tuple(line for line in layer.rules if line.name == name)
                kept = _kept_in_place(before, layer.rules, name)
                for later in layers[number + 1 :]:
                    kept = _with(kept, later)
                found.append(Restated(name=name, old=old, new=new, kept=kept))
        before = _with(before, layer) if number else layer.rules or ()
    return tuple(found)


def _kept_in_place(before: Rules, new: Rules, name: str) -> tuple[Rule, ...]:
    restated = set(names_of(new))
    kept: list[Rule] = []
    placed = False
    for line in before:
        if line.name == name and not placed:
            kept += [each for each in new if each.name == name]
            placed = True
        elif line.name not in restated:
            kept.append(line)
    return (*kept, *(line for line in new if line.name != name))


def _hidden(layer: RuleFile, preset: RuleFile) -> Hidden:
    names = names_of(layer.rules or ())
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return Hidden(
        what=f"rules for {', '.join(map(repr, names[:3]))}{more}",
        position=layer.positions[RULES],
        by=preset.positions[RULES],
    )


def _last(layers: Sequence[RuleFile], field_name: str) -> tuple:
    for layer in reversed(layers):
        value = getattr(layer, field_name)
        if value is not None:
            return value
    return ()

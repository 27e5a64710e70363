"""Several files into one configuration, as MaxText merges them, with a record of what that hides.

| source | rules | other keys |
|---|---|---|
| ``base_config`` of a file | replaced as a whole | replaced |
| base, then the file, then the model's own, then the command line | lines of a name that is stated again go, and the new ones are appended; all go where the later source says ``override_logical_axis_rules: true`` | replaced |
| a preset (``custom_mesh_and_rule``), after all of these | replaced as a whole, with ``mesh_axes`` and ``data_sharding`` | kept |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.findings.position import Position
from shardwright.interop.maxtext.reading.reading import RULES, RuleFile, Word
from shardwright.interop.maxtext.reading.rules import Rule, Rules, names_of

OVERRIDE = "override_logical_axis_rules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restated:
    """A name that a later source states again. ``kept``: the list, had its lines been put in place of the old ones."""

    name: str
    old: tuple[Rule, ...]
    new: tuple[Rule, ...]
    kept: tuple[Rule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """What an earlier source says and a later one replaces as a whole, unsaid."""

    what: str
    position: Position
    by: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What holds in the end. ``rules_from``: where the key of the list that won stands."""

    sources: tuple[str, ...]
    mesh_axes: tuple[Word, ...]
    rules: tuple[Rule, ...]
    eval_rules: tuple[Rule, ...] = ()
    data_sharding: tuple[Word, ...] = ()
    sizes: Mapping[str, Word] = field(default_factory=dict)
    settings: Mapping[str, Word] = field(default_factory=dict)
    restated: tuple[Restated, ...] = ()
    hidden: tuple[Hidden, ...] = ()
    preset: RuleFile | None = None
    rules_from: Position | None = None
    not_read: Mapping[str, Position] = field(default_factory=dict)
    """Keys of the command line that change no layout."""
    subject: str = ""
    """The file that says what the model is: the model's own, or the one that is imported."""
    model_file: str | None = None
    """MaxText's own file of the model, where it is among the sources."""
    replaced: Mapping[str, tuple[Word, Word]] = field(default_factory=dict)
    """What files say of the model and the model's own file replaces, unsaid: by key, the old word and the new."""
    base: str | None = None
    """What this was merged into though nobody gave it: the ``base.yml`` of the configs folder."""

    def says(self, key: str) -> str | int | float | bool | None:
        """The value of a setting; None where no source has it."""
        word = self.settings.get(key)
        return None if word is None else word.value


def extended(base: RuleFile, file: RuleFile) -> RuleFile:
    """A file over its ``base_config``: each key that it has replaces the base's, lists as a whole."""
    return RuleFile(
        source=file.source,
        mesh_axes=base.mesh_axes if file.mesh_axes is None else file.mesh_axes,
        rules=base.rules if file.rules is None else file.rules,
        eval_rules=base.eval_rules if file.eval_rules is None else file.eval_rules,
        data_sharding=base.data_sharding if file.data_sharding is None else file.data_sharding,
        sizes={**base.sizes, **file.sizes},
        settings={**base.settings, **file.settings},
        positions={**base.positions, **file.positions},
    )


def merged(
    layers: Sequence[RuleFile], preset: RuleFile | None = None, eval_preset: RuleFile | None = None
) -> Configuration:
    """The configuration of base, file and command line, in that order, and then a preset's.

    ``eval_preset``: whose rules stand in for evaluation; without one they are the training's.
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
        # A preset is made to replace the rules of a complete base, which has a mesh of its own; others meant theirs to hold.
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
        sizes={key: word for layer in layers for key, word in layer.sizes.items()},
        settings={key: word for layer in layers for key, word in layer.settings.items()},
        restated=restated,
        hidden=tuple(hidden),
        preset=preset,
        rules_from=place,
        not_read=layers[-1].not_read,
        subject=layers[-1].source,
    )


def _with(rules: tuple[Rule, ...], layer: RuleFile) -> tuple[Rule, ...]:
    """The list after one more source, which may override all and then have none."""
    new = layer.rules or ()
    if _overrides(layer):
        return new
    names = set(names_of(new))
    return (*(line for line in rules if line.name not in names), *new)


def _overrides(layer: RuleFile) -> bool:
    word = layer.settings.get(OVERRIDE)
    return word is not None and word.value is True


def _restated(layers: Sequence[RuleFile]) -> tuple[Restated, ...]:
    """Every name that was stated again, with the list that would have been, had that name's lines kept their place."""
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

"""Which files an import reads: a configuration, what it extends, and the presets that it or the command line names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.core.errors import InputError
from shardwright.core.nearest import did_you_mean
from shardwright.interop.maxtext.merging import Configuration, extended, merged
from shardwright.interop.maxtext.placing import Dialect
from shardwright.interop.maxtext.reading import RULES, RuleFile, Word, parse_given, read_rule_file

PRESETS = "custom_mesh_and_rule"
"""The folder of presets, beside the base configuration, and the key that names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to import. ``given``: KEY=VALUE texts of a command line. ``mesh_sizes`` stand in for the files' own.

    ``model`` None: that of ``model_name``, or one that has what the rules name.
    """

    file: str
    base: str | None = None
    preset: str | None = None
    eval_preset: str | None = None
    given: tuple[str, ...] = ()
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    mesh_sizes: Mapping[str, int] | None = None
    devices: int | None = None
    slices: int = 1
    batch: int | None = None
    length: int | None = None
    dialect: Dialect = "linen"


def read_configuration(asked: Asked) -> Configuration:
    """Every file that an import reads, merged as MaxText merges them."""
    file = _with_its_base(read_rule_file(asked.file), asked)
    used_as_base = "base_config" in file.settings
    layers = [file]
    if asked.base is not None and not used_as_base:
        layers.insert(0, _with_its_base(read_rule_file(asked.base), asked))
    given = parse_given(asked.given)
    if given.positions:
        layers.append(given)
    names = {key: word for layer in layers for key, word in layer.settings.items()}
    preset = _preset(asked.preset, names.get(PRESETS), layers)
    eval_preset = _preset(asked.eval_preset, names.get(f"{PRESETS}_for_eval"), layers)
    if preset is None and all(layer.rules is None for layer in layers):
        raise InputError(f"{asked.file}: this is no file of MaxText's rules: it has no '{RULES}'.")
    configuration = merged(layers, preset, eval_preset)
    if not configuration.mesh_axes:
        raise InputError(
            f"{asked.file}: no 'mesh_axes'. Give the file that has them, with the rules that these are added to: "
            "--base base.yml."
        )
    return configuration


def _with_its_base(file: RuleFile, asked: Asked) -> RuleFile:
    """A file over the one that its ``base_config`` names, which lies beside it or is given."""
    word = file.settings.get("base_config")
    if word is None or not word.value:
        return file
    path = Path(file.source).parent / str(word.value)
    if not path.is_file() and asked.base is not None:
        path = Path(asked.base)
    if not path.is_file():
        raise InputError(
            f"{word.position}: base_config '{word.value}' does not lie beside this file. Give it: --base PATH."
        )
    base = read_rule_file(path)
    if "base_config" in base.settings and base.settings["base_config"].value:
        if path.resolve() == Path(file.source).resolve():
            raise InputError(f"{word.position}: base_config names this very file.")
        base = _with_its_base(base, replace(asked, base=None))
    return extended(base, file)


def _preset(path: str | None, word: Word | None, layers: list[RuleFile]) -> RuleFile | None:
    if path is None:
        if word is None or not word.value:
            return None
        folders = [Path(layer.source).parent / PRESETS for layer in layers]
        found = next((f / f"{word.value}.yml" for f in folders if (f / f"{word.value}.yml").is_file()), None)
        if found is None:
            option = "--eval-preset" if word is layers[-1].settings.get(f"{PRESETS}_for_eval") else "--preset"
            known = sorted({p.stem for folder in folders if folder.is_dir() for p in folder.glob("*.yml")})
            near = f" {did_you_mean(str(word.value), known)}" if known else ""
            raise InputError(
                f"{word.position}: no file {PRESETS}/{word.value}.yml beside the configuration.{near} "
                f"Give it: {option} PATH."
            )
        path = str(found)
    preset = read_rule_file(path)
    if preset.rules is None:
        raise InputError(f"{path}: this is no preset of MaxText's: it has no '{RULES}'.")
    return preset

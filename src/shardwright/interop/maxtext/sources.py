"""Which files an import reads: a configuration, what it extends, and the presets that it or the command line names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.interop.maxtext.reading.merging import Configuration, extended, merged
from shardwright.interop.maxtext.reading.model_files import meant
from shardwright.interop.maxtext.reading.model_vocabulary import MODEL_KEYS
from shardwright.interop.maxtext.reading.reading import RULES, RuleFile, Word, parse_given, read_rule_file
from shardwright.interop.maxtext.resolution.placing import Dialect

PRESETS = "custom_mesh_and_rule"
"""The folder of presets, beside the base configuration, and the key that names one."""

OVERRIDES = "override_model_config"
"""Whether keys of the command line may replace those of the model's own file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextRequest:
    """What to import. ``given``: KEY=VALUE texts of a command line. ``mesh_sizes`` stand in for the files' own.

    ``model`` None: the one that the files say.
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


def read_configuration(asked: MaxTextRequest) -> Configuration:
    """Every file that an import reads, merged as MaxText merges them.

    A file that names a model is followed by that model's own, ``models/NAME.yml``, where it is there; that one comes after
    ``base.yml``.
    """
    file = _with_its_base(read_rule_file(asked.file), asked)
    layers = [file]
    base = _base_of(file, asked)
    if base is not None:
        layers.insert(0, _with_its_base(read_rule_file(base), asked))
    given = parse_given(asked.given)
    model_file = asked.file if _is_a_models(asked.file) else None
    replaced: dict[str, tuple[Word, Word]] = {}
    if model_file is None:
        model = _model_file(layers if not given.positions else [*layers, given], asked)
        if model is not None:
            model_file = model.source
            replaced = _replaced(layers, model, given)
            layers.append(model)
    if given.positions or given.not_read:
        layers = [*(_beside(layer, layers, given) if layer.source == model_file else layer for layer in layers), given]
    names = {key: word for layer in layers for key, word in layer.settings.items()}
    preset = _preset(asked.preset, names.get(PRESETS), layers, asked)
    eval_preset = _preset(asked.eval_preset, names.get(f"{PRESETS}_for_eval"), layers, asked)
    if preset is None and all(layer.rules is None for layer in layers):
        raise InputError(f"{asked.file}: this is no file of MaxText's rules: it has no '{RULES}'.")
    configuration = merged(layers, preset, eval_preset)
    if not configuration.mesh_axes:
        raise InputError(
            f"{asked.file}: no 'mesh_axes'. Give the file that has them, with the rules that these are added to: "
            "--base base.yml."
        )
    return replace(
        configuration,
        subject=model_file or asked.file,
        model_file=model_file,
        replaced=replaced,
        base=base if asked.base is None else None,
    )


def configs_folder(path: str | Path) -> Path | None:
    """The folder of MaxText's that a file lies in, at any depth: the nearest above it that has a ``base.yml``."""
    return next((folder for folder in Path(path).resolve().parents if (folder / "base.yml").is_file()), None)


def _folders(files: Iterable[str], asked: MaxTextRequest) -> list[Path]:
    """Where MaxText looks for a file that another names: beside it, and in the configs folder."""
    near = [Path(file).parent for file in files]
    above = (configs_folder(file) for file in (asked.file, *((asked.base,) if asked.base else ())))
    return list(dict.fromkeys([*near, *(_as_given(folder) for folder in above if folder is not None)]))


def _as_given(folder: Path) -> Path:
    """A folder as a user would write it from where the command runs."""
    return Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder


def _is_a_models(path: str) -> bool:
    folder = configs_folder(path)
    return folder is not None and Path(path).resolve().parent == folder / "models"


def _base_of(file: RuleFile, asked: MaxTextRequest) -> str | None:
    """The file that this one is merged into: the one that was given, or for a model's own the ``base.yml`` above it."""
    if "base_config" in file.settings:
        return None
    if asked.base is not None:
        return asked.base
    folder = configs_folder(asked.file)
    return str(_as_given(folder) / "base.yml") if folder is not None and _is_a_models(asked.file) else None


def _model_file(layers: Sequence[RuleFile], asked: MaxTextRequest) -> RuleFile | None:
    """MaxText's file of the model that is named, where it is there."""
    word = next((layer.settings["model_name"] for layer in reversed(layers) if "model_name" in layer.settings), None)
    if word is None or word.value in ("", "default"):
        return None
    name = f"{str(word.value).replace('-Instruct', '')}.yml"
    here = _folders([asked.file], asked)
    for folder in (*here, *(folder.parent for folder in here)):
        if (folder / "models" / name).is_file():
            return read_rule_file(folder / "models" / name)
    return None


def _replaced(layers: Sequence[RuleFile], model: RuleFile, given: RuleFile) -> dict[str, tuple[Word, Word]]:
    """What a model's own file, which comes last, replaces of what files say of the model's weights; old and new."""
    said = {key: word for layer in layers for key, word in layer.settings.items() if key in MODEL_KEYS}
    return {
        key: (word, model.settings[key])
        for key, word in said.items()
        if key in model.settings
        and key not in given.settings
        and word.value != model.settings[key].value
        and meant(key, word.value, said)
    }


def _beside(model: RuleFile, layers: Sequence[RuleFile], given: RuleFile) -> RuleFile:
    """A model's own file beside a command line: MaxText takes no key from both, unless it is told that the latter has it."""
    override = next((w.value for layer in (given, *reversed(layers)) if (w := layer.settings.get(OVERRIDES))), False)
    if override is True:
        return model if given.rules is None else replace(model, rules=None)
    said = {**model.settings, **model.sizes}
    for key, word in {**given.settings, **given.sizes}.items():
        if key in said and said[key].value != word.value:
            refuse_twice(key, f"{word.value}, and {said[key].position} says {said[key].value}")
    if (
        model.rules is not None
        and given.rules is not None
        and list(map(str, model.rules)) != list(map(str, given.rules))
    ):
        refuse_twice(RULES, f"{len(given.rules)}, and {model.positions[RULES]} says others")
    return model


def refuse_twice(key: str, found: str) -> NoReturn:
    """Of a key that the command line and the model's own file have, with different values."""
    raise InputError(
        f"--given {key}: {found}: MaxText takes neither. Add {OVERRIDES}=true, which lets the command line have it, or "
        "take it out."
    )


def _with_its_base(file: RuleFile, asked: MaxTextRequest, below: tuple[Path, ...] = ()) -> RuleFile:
    """A file over the one that its ``base_config`` names, which lies beside it or in its configs folder, or is given."""
    word = file.settings.get("base_config")
    if word is None or not word.value:
        return file
    here = Path(file.source)
    beside = (folder / str(word.value) for folder in _folders([file.source], replace(asked, file=file.source)))
    path = next((each for each in beside if each.is_file()), None)
    if path is None and asked.base is not None and not below:
        path = Path(asked.base)
    if path is None or not path.is_file():
        raise InputError(
            f"{word.position}: base_config '{word.value}' lies neither beside this file nor in a configs folder above it. "
            "Give it: --base PATH."
        )
    if path.resolve() in (here.resolve(), *below):
        raise InputError(f"{word.position}: base_config names this very file{', by way of others' if below else ''}.")
    return extended(_with_its_base(read_rule_file(path), asked, (*below, here.resolve())), file)


def _preset(path: str | None, word: Word | None, layers: list[RuleFile], asked: MaxTextRequest) -> RuleFile | None:
    if path is None:
        if word is None or not word.value:
            return None
        folders = [folder / PRESETS for folder in _folders([layer.source for layer in layers], asked)]
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

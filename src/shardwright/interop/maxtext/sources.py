"""The files that an import reads: a configuration, those that it extends, and the presets that it or the command line names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.findings.position import Position
from shardwright.interop.maxtext.reading.merging import Configuration, extended, merged
from shardwright.interop.maxtext.reading.model_files import is_deliberate
from shardwright.interop.maxtext.reading.model_vocabulary import MODEL_KEYS
from shardwright.interop.maxtext.reading.presets import PRESETS as KNOWN_PRESETS
from shardwright.interop.maxtext.reading.presets import known_preset
from shardwright.interop.maxtext.reading.reading import RULES, RuleFile, Scalar, parse_given, read_rule_file
from shardwright.interop.maxtext.resolution.placement import Dialect

PRESETS = "custom_mesh_and_rule"
"""The folder of presets, next to the base configuration; also the key that names one."""

OVERRIDES = "override_model_config"
"""The key that lets the command line replace keys of the model's own file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextRequest:
    """What to import. ``given``: KEY=VALUE texts of a command line. ``mesh_sizes`` replace those of the files; -1: the remaining devices.

    ``model`` None: the one that the files set. ``like``: one whose table is used in place of theirs. ``out``: the file that the layout is written to.
    """

    file: str
    base: str | None = None
    preset: str | None = None
    eval_preset: str | None = None
    given: tuple[str, ...] = ()
    model: str | None = None
    like: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    mesh_sizes: Mapping[str, int] | None = None
    devices: int | None = None
    slices: int | None = None
    batch: int | None = None
    length: int | None = None
    out: str | None = None
    dialect: Dialect = "linen"

    @property
    def layout_file(self) -> str:
        """The file that the layout is written to, or the one to name."""
        return self.out or f"{Path(self.file).stem}.yaml"


def read_configuration(request: MaxTextRequest) -> Configuration:
    """Every file that an import reads, merged as MaxText merges them.

    A file that names a model is followed by that model's own file, ``models/NAME.yml``, where it exists. A model's own file is
    merged after ``base.yml``.
    """
    file = _with_its_base(read_rule_file(request.file), request)
    layers = [file]
    base = _base_of(file, request)
    if base is not None:
        layers.insert(0, _with_its_base(read_rule_file(base), request))
    given = parse_given(request.given)
    model_file = request.file if _is_a_models(request.file) else None
    replaced: dict[str, tuple[Scalar, Scalar]] = {}
    if model_file is None:
        model = _model_file(layers if not given.positions else [*layers, given], request)
        if model is not None:
            model_file = model.source
            replaced = _replaced(layers, model, given)
            layers.append(model)
    if given.positions or given.not_read:
        layers = [
            *(_checked_against(layer, layers, given) if layer.source == model_file else layer for layer in layers),
            given,
        ]
    names = {key: scalar for layer in layers for key, scalar in layer.settings.items()}
    preset = _preset(request.preset, names.get(PRESETS), layers, request)
    eval_preset = _preset(request.eval_preset, names.get(f"{PRESETS}_for_eval"), layers, request)
    if preset is None and all(layer.rules is None for layer in layers):
        raise InputError(f"{request.file}: not a MaxText rule file: it has no '{RULES}'.")
    configuration = merged(layers, preset, eval_preset)
    if not configuration.mesh_axes:
        raise InputError(
            f"{request.file}: no 'mesh_axes'. Give the file that has them, to which these rules are added: "
            "--base base.yml."
        )
    return replace(
        configuration,
        subject=model_file or request.file,
        model_file=model_file,
        replaced=replaced,
        base=base if request.base is None else None,
    )


def configs_folder(path: str | Path) -> Path | None:
    """MaxText's configs folder of a file: the nearest folder above it with a ``base.yml``."""
    return next((folder for folder in Path(path).resolve().parents if (folder / "base.yml").is_file()), None)


def _folders(files: Iterable[str], request: MaxTextRequest) -> list[Path]:
    """The folders where MaxText looks for a file that another names: that file's, and the configs folder."""
    near = [Path(file).parent for file in files]
    above = (configs_folder(file) for file in (request.file, *((request.base,) if request.base else ())))
    return list(dict.fromkeys([*near, *(_as_given(folder) for folder in above if folder is not None)]))


def _as_given(folder: Path) -> Path:
    """A folder relative to the current directory, where it is below it."""
    return Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder


def _is_a_models(path: str) -> bool:
    folder = configs_folder(path)
    return folder is not None and Path(path).resolve().parent == folder / "models"


def _base_of(file: RuleFile, request: MaxTextRequest) -> str | None:
    """The file that this one is merged into: ``--base``, or for a model's own file the ``base.yml`` above it."""
    if "base_config" in file.settings:
        return None
    if request.base is not None:
        return request.base
    folder = configs_folder(request.file)
    return str(_as_given(folder) / "base.yml") if folder is not None and _is_a_models(request.file) else None


def _model_file(layers: Sequence[RuleFile], request: MaxTextRequest) -> RuleFile | None:
    """MaxText's file of the named model, where it exists."""
    scalar = next((layer.settings["model_name"] for layer in reversed(layers) if "model_name" in layer.settings), None)
    if scalar is None or scalar.value in ("", "default"):
        return None
    name = f"{str(scalar.value).replace('-Instruct', '')}.yml"
    here = _folders([request.file], request)
    for folder in (*here, *(folder.parent for folder in here)):
        if (folder / "models" / name).is_file():
            return read_rule_file(folder / "models" / name)
    return None


def _replaced(layers: Sequence[RuleFile], model: RuleFile, given: RuleFile) -> dict[str, tuple[Scalar, Scalar]]:
    """Keys on the model's weights that the model's own file, which is merged last, replaces: old and new values."""
    earlier = {key: scalar for layer in layers for key, scalar in layer.settings.items() if key in MODEL_KEYS}
    return {
        key: (scalar, model.settings[key])
        for key, scalar in earlier.items()
        if key in model.settings
        and key not in given.settings
        and scalar.value != model.settings[key].value
        and is_deliberate(key, scalar.value, earlier)
    }


def _checked_against(model: RuleFile, layers: Sequence[RuleFile], given: RuleFile) -> RuleFile:
    """A model's own file, checked against a command line: MaxText refuses a key that both set, unless OVERRIDES is true."""
    override = next((w.value for layer in (given, *reversed(layers)) if (w := layer.settings.get(OVERRIDES))), False)
    if override is True:
        return model if given.rules is None else replace(model, rules=None)
    own = {**model.settings, **model.sizes}
    for key, scalar in {**given.settings, **given.sizes}.items():
        if key in own and own[key].value != scalar.value:
            refuse_conflict(key, f"{scalar.value}, and {own[key].position} has {own[key].value}")
    if (
        model.rules is not None
        and given.rules is not None
        and list(map(str, model.rules)) != list(map(str, given.rules))
    ):
        refuse_conflict(RULES, f"{len(given.rules)}, and {model.positions[RULES]} has others")
    return model


def refuse_conflict(key: str, found: str) -> NoReturn:
    """Refuse a key that the command line and the model's own file set to different values."""
    raise InputError(
        f"--given {key}: {found}: MaxText refuses both. Add {OVERRIDES}=true, with which the command line wins, or "
        "take it out."
    )


class NoTableError(InputError):
    """A decoder, or an option of one, that no table of ours has. ``reason``: the message without its place."""

    def __init__(self, place: str, position: Position | None, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.position, self.reason = position, reason


def refuse_weights(configuration: Configuration, key: str, message: str) -> NoReturn:
    """Refuse a model whose weights no table of ours has; its rules can still be read."""
    scalar = configuration.settings.get(key)
    position = None if scalar is None else scalar.position
    raise NoTableError(str(position or configuration.subject), position, message)


def _with_its_base(file: RuleFile, request: MaxTextRequest, below: tuple[Path, ...] = ()) -> RuleFile:
    """A file merged over its ``base_config``, which is in the same folder, in its configs folder, or given by ``--base``."""
    scalar = file.settings.get("base_config")
    if scalar is None or not scalar.value:
        return file
    here = Path(file.source)
    paths = (folder / str(scalar.value) for folder in _folders([file.source], replace(request, file=file.source)))
    path = next((each for each in paths if each.is_file()), None)
    if path is None and request.base is not None and not below:
        path = Path(request.base)
    if path is None or not path.is_file():
        raise InputError(
            f"{scalar.position}: base_config '{scalar.value}' is neither next to this file nor in a configs folder above it. "
            "Give it: --base PATH."
        )
    if path.resolve() in (here.resolve(), *below):
        raise InputError(f"{scalar.position}: base_config names this file{', through others' if below else ''}.")
    return extended(_with_its_base(read_rule_file(path), request, (*below, here.resolve())), file)


def _preset(
    path: str | None, scalar: Scalar | None, layers: list[RuleFile], request: MaxTextRequest
) -> RuleFile | None:
    if path is None:
        if scalar is None or not scalar.value:
            return None
        folders = [folder / PRESETS for folder in _folders([layer.source for layer in layers], request)]
        found = next((f / f"{scalar.value}.yml" for f in folders if (f / f"{scalar.value}.yml").is_file()), None)
        known_here = known_preset(str(scalar.value)) if found is None else None
        if known_here is not None:
            return known_here
        if found is None:
            option = "--eval-preset" if scalar is layers[-1].settings.get(f"{PRESETS}_for_eval") else "--preset"
            files = {p.stem for folder in folders if folder.is_dir() for p in folder.glob("*.yml")}
            near = f" {did_you_mean(str(scalar.value), sorted({*files, *KNOWN_PRESETS}))}"
            raise InputError(
                f"{scalar.position}: no file {PRESETS}/{scalar.value}.yml next to the configuration.{near} "
                f"Give it: {option} PATH."
            )
        path = str(found)
    preset = read_rule_file(path)
    if preset.rules is None:
        raise InputError(f"{path}: not a MaxText preset: it has no '{RULES}'.")
    return preset

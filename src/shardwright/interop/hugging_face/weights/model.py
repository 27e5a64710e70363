"""The model of a folder or of a checkpoint: its name and settings here, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.checkpoint import Checkpoint
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.model.architecture import architecture_values, differences_of_weights
from shardwright.core.model.table import ModelTable
from shardwright.interop.hugging_face.command import nearest_named
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.published import Published, parse_config, read_config
from shardwright.interop.hugging_face.weights.files.folder import Folder
from shardwright.interop.hugging_face.weights.mapping import ExpertsForm
from shardwright.interop.hugging_face.written_config import written_config
from shardwright.models import build
from shardwright.training.partial import OFFER, SHOWN_BY_TENSORS, PartialWeights
from shardwright.training.published import METADATA


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model by its name here and its settings. ``config``: the text of the configuration, where there is one; ``config_is_written``: it is
    made of the architecture, and was not published."""

    name: str
    settings: Mapping[str, str]
    table: ModelTable
    config: str | None
    config_is_written: bool = False
    findings: tuple[Finding, ...] = ()

    @property
    def published(self) -> Published | None:
        """The configuration, parsed."""
        return None if self.config is None else parse_config(self.config, f"config.json of {self.name}")

    @property
    def command(self) -> str:
        """The arguments with which a command takes this model."""
        values = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name} --set {values}" if values else self.name


def model_of_folder(folder: Folder, name: str | None, settings: Mapping[str, str]) -> KnownModel:
    """The model of a folder's configuration, or a named one, which the configuration must not contradict.

    Raises InputError for a folder without a configuration and a name, and where the two differ.
    """
    if name is None:
        if folder.config is None:
            raise InputError(f"{folder.path}: there is no config.json. Give the model with --model, as llama3-8b.")
        return _of_config(folder.config)
    return replace(model_of_table(folder, build(name, settings)), name=name, settings=settings)


def model_of_table(folder: Folder, table: ModelTable, partial: PartialWeights | None = None) -> KnownModel:
    """The model of a table, which the folder's configuration must not contradict. Raises InputError where it does.

    ``partial``: what a run asks of the folder: values may differ that its tensors show. Where one does, the configuration is not
    the model's, and is left out.
    """
    if folder.config is None:
        return KnownModel(name=table.name, settings={}, table=table, config=None)
    found = model_of(folder.config)
    theirs, ours = architecture_values(found.table), architecture_values(table)
    permitted = () if partial is None else partial.permitted
    offered = partial is not None and not differences_of_weights(theirs, ours, SHOWN_BY_TENSORS)
    more = f"\n{OFFER}" if offered else ""
    _require_same(theirs, ours, folder.config.source, table.name, permitted, more)
    config = None if differences_of_weights(theirs, ours) else folder.config.text
    return KnownModel(name=table.name, settings={}, table=table, config=config, findings=found.findings)


def model_of_checkpoint(
    checkpoint: Checkpoint, config: Path | None, name: str | None, settings: Mapping[str, str]
) -> KnownModel:
    """The model of a checkpoint: by a configuration that is given, a name that is given, or what the checkpoint keeps: the
    configuration with which its weights were published, or its architecture."""
    kept, metadata = _kept(checkpoint), checkpoint.point.metadata
    if config is not None:
        found = _of_config(read_config(str(config)))
    elif name is not None or settings:
        name = checkpoint.point.model if name is None else name
        table = build(name, settings)
        text = written_config({**metadata, **architecture_values(table)}, table.dtype)
        found = KnownModel(name=name, settings=settings, table=table, config=text, config_is_written=text is not None)
    elif isinstance(kept.get("config"), str):
        found = _of_config(parse_config(kept["config"], f"{checkpoint.directory}: config.json"))
    elif (text := written_config(metadata, "float32")) is not None:
        found = replace(_of_config(parse_config(text, str(checkpoint.directory))), config_is_written=True)
    elif checkpoint.point.of_own_program:
        raise InputError(
            f"{checkpoint.directory}: a program of your own saved it, and its tensors are those of no model here. load of "
            f"shardwright.engine_jax and engine_torch reads it onto any sharding; ckpt export dcp and export orbax write it for "
            f"other programs."
        )
    else:
        name = checkpoint.point.model
        found = KnownModel(name=name, settings={}, table=build(name), config=None)
    where = str(config) if config is not None else f"--model {found.name}"
    _require_same(architecture_values(found.table), metadata, where, str(checkpoint.directory))
    window, length = found.table.attention_window, metadata.get("length")
    if window is not None and isinstance(length, int) and length > window:
        raise InputError(
            f"{checkpoint.directory}: it was trained on rows of {length:,} tokens with attention to all of them, and {where} has a window of "
            f"{window:,}. Nothing was written. Give a configuration without 'sliding_window' with --config."
        )
    return found


def experts_form(checkpoint: Checkpoint) -> ExpertsForm:
    """How experts were held in the folder that was imported; one by one where it was none."""
    return "stacked" if _kept(checkpoint).get("experts") == "stacked" else "each"


def _kept(checkpoint: Checkpoint) -> Mapping[str, Any]:
    kept = checkpoint.point.metadata.get(METADATA)
    return kept if isinstance(kept, dict) else {}


def _of_config(config: Published) -> KnownModel:
    model = model_of(config)
    name, settings = nearest_named(model)
    return KnownModel(
        name=name, settings=dict(settings), table=model.table, config=config.text, findings=model.findings
    )


def _require_same(
    found: Mapping[str, Any],
    needed: Mapping[str, Any],
    where: str,
    other: str,
    permitted: Sequence[str] = (),
    more: str = "",
) -> None:
    changed = differences_of_weights(found, needed, permitted)
    if changed:
        lines = "\n".join(changed)
        raise InputError(f"{where} and {other} are not the same model, and nothing was written:\n{lines}{more}")

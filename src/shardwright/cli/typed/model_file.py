"""MODEL as a folder or a configuration of Hugging Face: the same verb with the nearest model of our names, and what differs from it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from shardwright.cli.typed.output import write_view
from shardwright.cli.typed.values import settings
from shardwright.core.findings.bounds import require_path
from shardwright.models import build, names

CONFIG = "config.json"

Verb = TypeVar("Verb", bound=Any)


def with_named_model(verb: Verb, *, shows: bool = True, has_findings: bool = True) -> Verb:
    """The verb with a model of our names where its model is a path; else the verb as it is.

    What the path was taken for goes to standard error; not with ``shows`` False. What the configuration has and no table of ours is among
    the findings of the verb's plan; where the verb shows none (``has_findings`` False), on standard error too. ``--set`` and ``--dtype``
    have precedence. Raises InputError for a path without a configuration of a family that is known, and for a name on the Hub.
    """
    if verb.model is None or not _is_path(verb.model):
        return verb
    from shardwright.interop.hugging_face.command import nearest_named
    from shardwright.interop.hugging_face.config import model_of
    from shardwright.interop.hugging_face.hub_names import refuse_hub_name
    from shardwright.interop.hugging_face.published import read_config

    path = Path(verb.model)
    refuse_hub_name(verb.model)
    model = model_of(read_config(str(path / CONFIG if path.is_dir() else path)))
    name, changes = nearest_named(model)
    values = {**changes, **settings(verb.plan.set)}
    dtype = verb.plan.dtype or (None if model.size.dtype == build(name).dtype else model.size.dtype)
    if shows:
        given = f" --set {' '.join(f'{key}={value}' for key, value in changes.items())}" if changes else ""
        sys.stderr.write(
            f"{verb.model} is {name}{given}{f' --dtype {dtype}' if dtype and not verb.plan.dtype else ''}\n"
        )
        if model.besides and not has_findings:
            from shardwright.report.plan.findings_view import findings_list

            write_view(lambda width: findings_list(model.besides, width), sys.stderr)
    pairs = tuple(f"{key}={value}" for key, value in values.items())
    options = replace(
        verb.plan,
        set=(pairs,) if pairs else (),
        dtype=dtype,
        besides=model.besides,
        training_only=model.table.training_only,
    )
    return replace(verb, model=name, plan=options)


def _is_path(model: str) -> bool:
    """Whether it is a path, and no name: with a separator, a .json file, or a folder that is there."""
    require_path(model)
    return model not in names() and ("/" in model or model.endswith(".json") or Path(model).is_dir())

"""`ckpt import` and `ckpt export` of the folders of other programs, which their own libraries read and write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.folder_verbs import ExportDcpVerb, ExportOrbaxVerb, ImportDcpVerb, ImportOrbaxVerb
from shardwright.cli.typed.output import write_json, write_view

Convert = Callable[[Callable[[int, int], None]], Mapping[str, Any]]
"""Converts a folder, and calls what it is given with the bytes that are done and all bytes."""


def run_import_dcp(verb: ImportDcpVerb) -> int:
    """Make a checkpoint of a folder of torch.distributed.checkpoint."""
    with needing_extra("torch", "importing a folder of torch.distributed.checkpoint"):
        folders = import_module("shardwright.engine_torch.dcp_folder")
    return _run(
        "importing",
        lambda progress: folders.import_folder(
            verb.folder,
            verb.out,
            step=verb.step,
            module=verb.module,
            optimizer=verb.optimizer,
            leave_out=[pattern for patterns in verb.leave_out for pattern in patterns],
            trusts=verb.trust_pickle,
            progress=progress,
        ),
        as_json=verb.json,
    )


def run_export_dcp(verb: ExportDcpVerb) -> int:
    """Write a folder for torch.distributed.checkpoint."""
    with needing_extra("torch", "exporting a folder for torch.distributed.checkpoint"):
        folders = import_module("shardwright.engine_torch.dcp_folder")
    return _run(
        "exporting", lambda progress: folders.export_folder(verb.directory, verb.out, progress), as_json=verb.json
    )


def run_import_orbax(verb: ImportOrbaxVerb) -> int:
    """Make a checkpoint of a folder of Orbax."""
    folders = _orbax("importing a folder of Orbax", "tensorstore")
    return _run(
        "importing",
        lambda progress: folders.import_folder(
            verb.folder,
            verb.out,
            step=verb.step,
            leave_out=[pattern for patterns in verb.leave_out for pattern in patterns],
            progress=progress,
        ),
        as_json=verb.json,
    )


def run_export_orbax(verb: ExportOrbaxVerb) -> int:
    """Write a folder for Orbax."""
    folders = _orbax("exporting a folder for Orbax", "orbax.checkpoint")
    return _run(
        "exporting", lambda progress: folders.export_folder(verb.directory, verb.out, progress), as_json=verb.json
    )


def _orbax(what: str, library: str) -> Any:
    """The module that converts. Accelerators are left to whoever computes: JAX is given the CPU, unless it has started."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with needing_extra("orbax", what):
        import_module(library)
        return import_module("shardwright.engine_jax.orbax_folder")


def _run(doing: str, convert: Convert, *, as_json: bool) -> int:
    if as_json:
        write_json(convert(lambda *_: None))
        return 0
    from shardwright.report.interop.folders_view import converted_view
    from shardwright.report.interop.weights_view import weights_progress

    with weights_progress(doing) as progress:
        converted = convert(progress)
    write_view(converted_view(converted), sys.stdout)
    return 0

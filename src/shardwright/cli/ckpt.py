"""`shardwright ckpt show`, `verify`, `reshard`, `import` and `export`."""

from __future__ import annotations

import sys
from importlib import import_module

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.folder_verbs import ExportDcpVerb, ExportOrbaxVerb, ImportDcpVerb, ImportOrbaxVerb
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.values import settings
from shardwright.cli.typed.verbs import (
    CkptVerb,
    ExportWeightsVerb,
    ImportWeightsVerb,
    LayoutOptions,
    ReshardVerb,
    ShowVerb,
    VerifyVerb,
)
from shardwright.core.findings.bounds import number_text
from shardwright.core.findings.errors import InputError


def run_ckpt(verb: CkptVerb) -> int:
    """Run one of the verbs about checkpoints."""
    match verb:
        case ShowVerb():
            return run_show(verb)
        case VerifyVerb():
            return run_verify(verb)
        case ReshardVerb():
            return run_reshard(verb)
        case ImportWeightsVerb():
            return run_import_weights(verb)
        case ImportDcpVerb():
            from shardwright.cli.running.folders import run_import_dcp

            return run_import_dcp(verb)
        case ImportOrbaxVerb():
            from shardwright.cli.running.folders import run_import_orbax

            return run_import_orbax(verb)
        case ExportWeightsVerb():
            return run_export_weights(verb)
        case ExportDcpVerb():
            from shardwright.cli.running.folders import run_export_dcp

            return run_export_dcp(verb)
        case ExportOrbaxVerb():
            from shardwright.cli.running.folders import run_export_orbax

            return run_export_orbax(verb)


def run_show(verb: ShowVerb) -> int:
    """Print what a checkpoint holds. Returns 1 if another checkpoint in the folder cannot be read."""
    with needing_extra("checkpoint", "reading checkpoints"):
        checkpoint = import_module("shardwright.checkpoint")
    shown = checkpoint.describe(verb.directory)
    if verb.layout is not None:
        with needing_extra("checkpoint", "reading checkpoints"):
            layouts = import_module("shardwright.cli.running.checkpoint_layouts")
        shown["load"] = layouts.load_onto(verb.directory, verb.layout, verb.on)
    elif verb.on != LayoutOptions():
        raise InputError(
            "--mesh, --devices, --engine, --stages, --model and --set are for a layout. Give it with --for."
        )
    if verb.json:
        write_json(shown)
    else:
        from shardwright.report.checkpoint_view import checkpoint_view

        write_view(checkpoint_view(shown), sys.stdout)
    return 1 if shown["damaged"] else 0


def run_verify(verb: VerifyVerb) -> int:
    """Check every byte of a checkpoint. Returns 1 if it is damaged."""
    with needing_extra("checkpoint", "reading checkpoints"):
        checkpoint = import_module("shardwright.checkpoint")
    checked = checkpoint.verify(verb.directory)
    if verb.json:
        write_json(checked)
    else:
        from shardwright.report.checkpoint_view import verified_view

        write_view(verified_view(checked), sys.stdout)
    return 0 if checked["ok"] else 1


def run_reshard(verb: ReshardVerb) -> int:
    """Write a checkpoint in the boxes of another layout."""
    with needing_extra("checkpoint", "resharding checkpoints"):
        layouts = import_module("shardwright.cli.running.checkpoint_layouts")
    if verb.json:
        write_json(layouts.reshard_onto(verb.directory, verb.layout, verb.on, verb.out, lambda *_: None))
        return 0
    from shardwright.report.checkpoint_view import resharded_view
    from shardwright.report.interop.weights_view import weights_progress

    with weights_progress("resharding") as progress:
        written = layouts.reshard_onto(verb.directory, verb.layout, verb.on, verb.out, progress)
    write_view(resharded_view(written), sys.stdout)
    return 0


def run_import_weights(verb: ImportWeightsVerb) -> int:
    """Make a checkpoint of a model folder."""
    if verb.set and verb.model is None:
        raise InputError("--set is for a model that --model gives. Without it, config.json has all dimensions.")
    with needing_extra("checkpoint", "importing weights"):
        importing = import_module("shardwright.interop.hugging_face.weights.importing")
    request = importing.WeightsImport(
        folder=verb.folder,
        out=verb.out,
        model=verb.model,
        settings=settings(verb.set),
        dtype=verb.dtype,
        keeps_prediction=verb.keep_prediction_layers,
        keeps_fp8=verb.keep_fp8,
    )
    if verb.json:
        write_json(importing.import_weights(request).to_json())
        return 0
    from shardwright.report.interop.weights_view import imported_view, weights_progress

    with weights_progress("importing") as progress:
        imported = importing.import_weights(request, progress)
    write_view(imported_view(imported), sys.stdout)
    return 0


def run_export_weights(verb: ExportWeightsVerb) -> int:
    """Write a model folder of a checkpoint."""
    with needing_extra("checkpoint", "exporting weights"):
        exporting = import_module("shardwright.interop.hugging_face.weights.exporting")
    if verb.max_file_bytes is not None and verb.max_file_bytes < 1:
        raise InputError(f"--max-file-bytes is {number_text(verb.max_file_bytes)}, and must be at least 1.")
    if verb.config is not None and (verb.model is not None or verb.set):
        raise InputError("--config gives the model. Leave out --model and --set.")
    request = exporting.WeightsExport(
        directory=verb.directory,
        to=verb.out,
        config=verb.config,
        model=verb.model,
        settings=settings(verb.set),
        dtype=verb.dtype,
        fp8=verb.fp8,
        average=verb.average,
        prediction_layers=verb.prediction_layers,
        max_file_bytes=verb.max_file_bytes or exporting.MAX_FILE_BYTES,
    )
    if verb.json:
        write_json(exporting.export_weights(request).to_json())
        return 0
    from shardwright.report.interop.weights_view import exported_view, weights_progress

    with weights_progress("exporting") as progress:
        exported = exporting.export_weights(request, progress)
    write_view(exported_view(exported), sys.stdout)
    return 0

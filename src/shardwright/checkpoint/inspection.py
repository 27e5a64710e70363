"""What a checkpoint directory holds and whether it is intact, as JSON values for the command line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.checkpoint.directory import checkpoints_directory, committed, leftovers, step_of, unknown
from shardwright.checkpoint.format.data_file import digest_of_span, read_span
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import FILE_NAME, Manifest, StoredBox
from shardwright.checkpoint.format.read_manifest import read_manifest
from shardwright.checkpoint.opened import Checkpoint, open_checkpoint
from shardwright.checkpoint.verified import digest_error, read_error


def describe(directory: Path | str) -> dict[str, Any]:
    """What the directory of a step, or of a run, holds, newest step first.

    ``{directory, checkpoints: [{directory, step, seed, data_position, model, layout: {name, text}, mesh, metadata,
    bytes, num_files, tensors: [{name, shape, dtype, spec, bytes, num_boxes}]}], damaged: [message], leftovers: [name]}``.
    Raises CheckpointError if there is no checkpoint.
    """
    directory = Path(directory)
    paths, unfinished, _ = _found_in(directory)
    shown: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in paths:
        try:
            shown.append(_described(open_checkpoint(path)))
        except CheckpointError as error:
            if not _is_gone(path):
                damaged.append(str(error))
    return {
        "directory": str(directory),
        "checkpoints": shown,
        "damaged": damaged,
        "leftovers": [path.name for path in unfinished],
    }


def verify(directory: Path | str) -> dict[str, Any]:
    """Verifies every byte of the checkpoint of a step, or of all checkpoints of a run, against the digests.

    ``{directory, ok, checkpoints: [{directory, ok, step, num_boxes, bytes, problems: [{code, message}]}], leftovers: [name],
    unknown: [name]}``. A file in a checkpoint that its manifest does not list is a problem; ``unknown`` is what else is next to
    the checkpoints of a run. Raises CheckpointError if there is no checkpoint.
    """
    directory = Path(directory)
    paths, unfinished, others = _found_in(directory)
    # A run at the same time may delete old checkpoints, if it is configured to keep a number of them.
    checked = [result for path in paths if (result := _verified(path))["ok"] or not _is_gone(path)]
    return {
        "directory": str(directory),
        "ok": all(item["ok"] for item in checked),
        "checkpoints": checked,
        "leftovers": [path.name for path in unfinished],
        "unknown": [path.name for path in others],
    }


def _found_in(directory: Path) -> tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...]]:
    """The checkpoints, the leftovers and what is neither in a directory: of a run, its ``checkpoints``, or of one step."""
    if (directory / FILE_NAME).exists() or step_of(directory) is not None:
        return (directory,), (), ()
    out = directory.parent if checkpoints_directory(directory.parent) == directory else directory
    found = committed(out)
    if not found:
        raise CheckpointError(
            f"{directory}: there is no checkpoint here. Give the --out of a run, or the directory of one step, "
            f"as in OUT/checkpoints/step-00000010."
        )
    return found, leftovers(out), unknown(out)


def _is_gone(path: Path) -> bool:
    return step_of(path) is not None and not path.exists()


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    point = checkpoint.point
    return {
        "directory": str(checkpoint.directory),
        "step": point.step,
        "seed": point.seed,
        "data_position": point.data_position,
        "model": point.model,
        "layout": {"name": point.layout_name, "text": point.layout_text},
        "mesh": dict(point.mesh),
        "metadata": dict(point.metadata),
        "bytes": sum(file.num_bytes for file in checkpoint.manifest.files),
        "num_files": len(checkpoint.manifest.files),
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.info.shape),
                "dtype": tensor.info.dtype,
                "spec": tensor.info.spec,
                "bytes": sum(stored.num_bytes for stored in tensor.boxes),
                "num_boxes": len(tensor.boxes),
            }
            for name, tensor in checkpoint.manifest.tensors.items()
        ],
    }


def _verified(directory: Path) -> dict[str, Any]:
    problems: list[CheckpointError] = []
    result: dict[str, Any] = {"directory": str(directory), "step": None, "num_boxes": 0, "bytes": 0}
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as error:
        problems.append(error)
        # Where only a data file is wrong, the manifest still says what belongs here.
        with suppress(CheckpointError):
            problems += _unlisted_files(directory, read_manifest(directory))
    else:
        boxes = [(name, box) for name, tensor in checkpoint.manifest.tensors.items() for box in tensor.boxes]
        problems += [error for name, box in boxes if (error := _box_problem(directory, name, box))]
        problems += _unlisted_files(directory, checkpoint.manifest)
        result |= {
            "step": checkpoint.point.step,
            "num_boxes": len(boxes),
            "bytes": sum(file.num_bytes for file in checkpoint.manifest.files),
        }
    return {
        **result,
        "ok": not problems,
        "problems": [{"code": error.code, "message": str(error)} for error in problems],
    }


def _box_problem(directory: Path, name: str, stored: StoredBox) -> CheckpointError | None:
    try:
        found = digest_of_span(read_span(directory / stored.file, stored.offset, stored.num_bytes))
    except OSError as error:
        return read_error(directory, name, stored, error)
    return None if found == stored.digest else digest_error(directory, name, stored)


def _unlisted_files(directory: Path, manifest: Manifest) -> list[CheckpointError]:
    """An error for each file that the manifest does not list. Nothing reads such a file, and a save never leaves one."""
    listed = {FILE_NAME, *(file.name for file in manifest.files)}
    try:
        return [
            CheckpointError(f"{path}: the manifest does not list this file. Move it away.")
            for path in sorted(directory.iterdir())
            if path.name not in listed
        ]
    except OSError as error:
        return [CheckpointError(f"{directory}: its files cannot be listed: {error.strerror}.")]

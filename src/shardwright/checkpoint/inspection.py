"""What a checkpoint directory holds and whether it is intact, as JSON values for the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

from shardwright.checkpoint.folder.directory import beside, committed, is_gone, is_step, leftovers, under_way, unknown
from shardwright.checkpoint.folder.names import checkpoints_directory, no_checkpoint, step_of
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError, proves_nothing
from shardwright.checkpoint.format.manifest import FILE_NAME, INDEX_NAME, TIME, Manifest
from shardwright.checkpoint.format.part import DATA_NAME, StoredBox, data_name, part_name
from shardwright.checkpoint.format.read_manifest import read_manifest
from shardwright.checkpoint.reading.opened import Checkpoint, open_checkpoint
from shardwright.checkpoint.reading.streams import PieceReader
from shardwright.checkpoint.retention.kept import kept
from shardwright.checkpoint.retention.rules import KEEP_ALL
from shardwright.checkpoint.writing.retention import saved_point
from shardwright.storage.files import each, sizes_in
from shardwright.storage.url import Place, local_path, parsed_place


def describe(directory: Place | str) -> dict[str, Any]:
    """What the directory of a step, or of a run, holds, newest step first.

    ``{directory, keep, checkpoints: [{directory, step, saved_at, metrics, kept_by, seed, data_position, model,
    layout: {name, text}, mesh, metadata, bytes, num_files, tensors: [{name, shape, dtype, spec, bytes, num_boxes}]}],
    damaged: [message], unread: [message], under_way: [name], leftovers: [name]}``. ``unread``: of steps that cannot be read, which proves no damage. ``under_way``: what is being saved or deleted now; in a store what was
    written to in the last 30 minutes. ``keep``: the rules of the newest save, which decide what the next save deletes;
    ``kept_by``: those that keep a step now. Raises CheckpointError if there is no checkpoint.
    """
    directory = parsed_place(directory)
    paths, unfinished, _ = _found_in(directory)
    alive, dead = _alive_and_dead(unfinished)
    opened: list[Checkpoint] = []
    damaged: list[str] = []
    unread: list[str] = []
    for path in paths:
        try:
            opened.append(open_checkpoint(path))
        except CheckpointError as error:
            if not is_gone(path):
                (unread if proves_nothing(error) else damaged).append(str(error))
            elif path == directory:
                raise no_checkpoint(directory) from error
    rules = opened[0].manifest.keep if opened else KEEP_ALL
    # Of one step alone the rules say nothing.
    steps = {} if paths == (directory,) else kept([saved_point(one.manifest) for one in opened], rules)
    return {
        "directory": str(directory),
        "keep": rules.to_json(),
        "checkpoints": [_described(one, steps.get(one.point.step, ())) for one in opened],
        "damaged": damaged,
        "unread": unread,
        "under_way": [_name(path) for path in alive],
        "leftovers": [_name(path) for path in dead],
    }


def verify(directory: Place | str) -> dict[str, Any]:
    """Verifies every byte of the checkpoint of a step, or of all checkpoints of a run, against the digests.

    ``{directory, ok, checkpoints: [{directory, ok, damaged, step, num_boxes, bytes, problems: [{code, message}]}], under_way: [name],
    leftovers: [name], unknown: [name]}``. ``under_way``: as of ``describe``. Not ``ok`` and
    not ``damaged``: it could not be read, which proves nothing. A file in a checkpoint that its manifest does not list is a problem; ``unknown`` is what else is next to
    the checkpoints of a run. Raises CheckpointError if there is no checkpoint.
    """
    directory = parsed_place(directory)
    paths, unfinished, others = _found_in(directory)
    alive, dead = _alive_and_dead(unfinished)
    # A run at the same time may delete old checkpoints, if it is configured to keep a number of them.
    checked = [result for path in paths if (result := _verified(path))["ok"] or not is_gone(path)]
    if not checked and paths == (directory,):
        raise no_checkpoint(directory)
    return {
        "directory": str(directory),
        "ok": all(item["ok"] for item in checked),
        "checkpoints": checked,
        "under_way": [_name(path) for path in alive],
        "leftovers": [_name(path) for path in dead],
        "unknown": [path.name for path in others],
    }


def _found_in(directory: Place) -> tuple[tuple[Place, ...], tuple[Place, ...], tuple[Place, ...]]:
    """The checkpoints, the leftovers and what is neither in a directory: of a run, its ``checkpoints``, or of one step."""
    if is_step(directory):
        if is_gone(directory):
            raise no_checkpoint(directory)
        return (directory,), (), ()
    out = directory.parent if checkpoints_directory(directory.parent) == directory else directory
    found = committed(out)
    if not found:
        if alive := under_way(leftovers(out)):
            raise CheckpointError(
                f"{directory}: there is no checkpoint here yet: {_name(alive[0])} is being saved now."
            )
        raise no_checkpoint(directory)
    return found, leftovers(out), unknown(out)


def _alive_and_dead(leftovers: Sequence[Place]) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """What is being saved or deleted now, and what is left of killed saves and deletions. What has ended meanwhile is neither."""
    alive = under_way(leftovers)
    dead = tuple(path for path in leftovers if path not in alive)
    return alive, tuple(path for path in dead if local_path(path) is None or os.path.lexists(str(path)))


def _described(checkpoint: Checkpoint, kept_by: Sequence[str]) -> dict[str, Any]:
    point, saved_at = checkpoint.point, checkpoint.manifest.saved_at
    return {
        "directory": str(checkpoint.directory),
        "step": point.step,
        "saved_at": None if saved_at is None else saved_at.strftime(TIME),
        "metrics": dict(point.metrics),
        "kept_by": list(kept_by),
        "seed": point.seed,
        "data_position": point.data_position,
        "model": point.model,
        "layout": {"name": point.layout_name, "text": point.layout_text},
        "mesh": dict(point.mesh),
        "metadata": dict(point.metadata),
        "bytes": checkpoint.num_bytes,
        "num_files": sum(part.num_files for part in checkpoint.manifest.parts),
        "tensors": [
            {
                "name": name,
                "shape": list(info.shape),
                "dtype": info.dtype,
                "spec": info.spec,
                "bytes": prod(info.shape) * DTYPES[info.dtype].num_bytes,
                "num_boxes": len(checkpoint.index.tables[name]),
            }
            for name, info in checkpoint.tensors.items()
        ],
    }


def _verified(directory: Place) -> dict[str, Any]:
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
        for process in range(len(checkpoint.parts)):
            stored = checkpoint.parts.stored(process)
            found = each(directory, lambda box: _box_problem(checkpoint, box), stored)
            problems += [error for error in found if error is not None]
            try:
                checkpoint.parts.check_headers(process)
            except CheckpointError as error:
                problems.append(error)
            result["num_boxes"] += len(stored)
        problems += _unlisted_files(directory, checkpoint.manifest)
        result |= {"step": checkpoint.point.step, "bytes": checkpoint.num_bytes}
    return {
        **result,
        "ok": not problems,
        "damaged": not all(proves_nothing(error) for error in problems),
        "problems": [{"code": error.code, "message": str(error)} for error in problems],
    }


def _box_problem(checkpoint: Checkpoint, stored: StoredBox) -> CheckpointError | None:
    try:
        with PieceReader(checkpoint.data_directory, stored, checkpoint.manifest.piece_bytes) as reader:
            reader.verify()
    except CheckpointError as error:
        return error
    return None


def _unlisted_files(directory: Place, manifest: Manifest) -> list[CheckpointError]:
    """An error for each file that the manifest does not list. Nothing reads such a file, and a save never leaves one."""
    files = manifest.data_directory(directory)
    names = (INDEX_NAME, *(part_name(process) for process in range(len(manifest.parts))))
    listed = {directory / FILE_NAME, files, *(files / name for name in names)}
    try:
        there = {directory / name for name in sizes_in(directory)} | {files / name for name in sizes_in(files)}
        listed |= {path for path in there if path.parent == files and _is_data_file(path.name, manifest)}
        return [
            CheckpointError(f"{path}: the manifest does not list this file. Move it away.")
            for path in sorted(there - listed - beside(directory))
        ]
    except OSError as error:
        return [CheckpointError(f"{directory}: its files cannot be listed: {error.strerror}.")]


def _name(leftover: Place) -> str:
    """A leftover's name next to the checkpoints."""
    return leftover.name if step_of(leftover.parent) is None else f"{leftover.parent.name}/{leftover.name}"


def _is_data_file(name: str, manifest: Manifest) -> bool:
    match = DATA_NAME.fullmatch(name)
    if match is None:
        return False
    process, number = int(match.group(1)), int(match.group(2))
    return (
        name == data_name(process, number)
        and process < len(manifest.parts)
        and number < manifest.parts[process].num_files
    )

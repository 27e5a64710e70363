"""Deletes old checkpoints that no rule keeps. It reads manifests, and never deletes the last complete checkpoint.

All that a save may cost is little beside the save itself, for any number of steps and processes. So a checkpoint counts as
complete if its manifest matches its own digest, and every file of the manifest is there with its size: no part and no data
file is read. Each manifest is read once by a process, and so are the sizes of files: of the checkpoint that was just written,
and of the newest other one that is kept. While these two are complete, what is deleted is never the last one. To
compare the digests of all elements here, one process would read what thousands have written; a resumed run compares
them as it reads, and takes an older checkpoint where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from shardwright.checkpoint.folder.directory import committed, delete
from shardwright.checkpoint.folder.names import step_of
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import FILE_NAME, INDEX_NAME, Manifest
from shardwright.checkpoint.format.part import DATA_NAME, part_name
from shardwright.checkpoint.format.proof import proven
from shardwright.checkpoint.format.read_manifest import read_manifest
from shardwright.checkpoint.retention.kept import SavedPoint, kept
from shardwright.checkpoint.retention.rules import Retention
from shardwright.storage.files import identity_of, sizes_in
from shardwright.storage.system import Identity
from shardwright.storage.url import Place

MOST_KNOWN = 10_000
"""So many steps are remembered by a process. What a manifest says does not change once it has its name."""


def delete_old(out: Place, just_written: Place, rules: Retention) -> tuple[Place, ...]:
    """Deletes the checkpoints that no rule keeps, oldest first, and returns them.

    The checkpoint just written is kept whatever its step. One that is damaged, as far as its manifest and the sizes of its
    files show, is neither counted nor deleted: a person has to look at it.

    Raises CheckpointError where they cannot be listed, where one cannot be deleted, or where the checkpoint just written is
    incomplete; then none is deleted. The message says whether the checkpoint just written is complete.
    """
    if rules.keeps_all:
        return ()
    try:
        points = {path: point for path in committed(out, once=True) if (point := _point(path)) is not None}
    except (CheckpointError, OSError) as error:
        raise _only_written(just_written, error) from error
    while True:
        steps = kept(points.values(), rules)
        doomed = tuple(path for path in reversed(points) if points[path].step not in steps and path != just_written)
        if not doomed:
            return ()
        other = next((path for path in points if path not in (*doomed, just_written)), None)
        if other is None or _problem(other) is None:
            break
        del points[other]
    problem = _problem(just_written)
    if isinstance(problem, DamagedError):
        raise CheckpointError(
            f"{just_written}: files of it are missing or have another size just after they were written, so no older "
            f"checkpoint was deleted. Look at this disk before the run goes on."
        )
    if problem is not None:
        raise _only_written(just_written, problem) from problem
    for path in doomed:
        try:
            delete(path)
        except OSError as error:
            raise CheckpointError(
                f"{just_written}: the checkpoint is written, and the old one {path.name} could not be deleted: {error.strerror}."
            ) from error
    return doomed


def _only_written(just_written: Place, error: CheckpointError | OSError) -> CheckpointError:
    reason = error.message if isinstance(error, CheckpointError) else f"{error.strerror or error}."
    return CheckpointError(
        f"{just_written}: this checkpoint is complete, and what should follow failed: older ones could not be looked for, and none "
        f"was deleted. {reason} Go on with --resume."
    )


def saved_point(manifest: Manifest) -> SavedPoint:
    """What the rules look at."""
    return SavedPoint(step=manifest.point.step, saved_at=manifest.saved_at, metrics=manifest.point.metrics)


def _point(directory: Place) -> SavedPoint | None:
    """What the manifest says of a step; None for one that cannot be read, is damaged or of another step."""
    try:
        manifest = identity_of(directory / FILE_NAME)
        point = saved_point(read_manifest(directory)) if manifest is None else _known_point(directory, manifest)
    except (CheckpointError, OSError):
        return None
    return point if point.step == step_of(directory) else None


# An exception is not remembered: a file that cannot be read now may be read later.
@lru_cache(maxsize=MOST_KNOWN)
def _known_point(directory: Place, identity: Identity) -> SavedPoint:
    del identity
    return saved_point(read_manifest(directory))


def _problem(directory: Place) -> CheckpointError | OSError | None:
    """Why a checkpoint cannot be counted on; DamagedError where files are missing or have another size."""
    try:
        # A file that appears, goes away or is replaced changes its directory.
        identities = identity_of(directory), identity_of(directory / FILE_NAME)
        if None in identities:
            _require_files(directory)
        else:
            _require_known_files(directory, *identities)
    except (CheckpointError, OSError) as error:
        return error
    return None


@lru_cache(maxsize=MOST_KNOWN)
def _require_known_files(directory: Place, *identities: Identity | None) -> None:
    del identities
    _require_files(directory)


def _require_files(directory: Place) -> None:
    """Raises DamagedError unless every file of the manifest is there, with its size."""
    manifest = read_manifest(directory)
    files = manifest.data_directory(directory)
    proven(files / INDEX_NAME, lambda: _require_sizes(directory, files, manifest))


def _require_sizes(directory: Place, files: Place, manifest: Manifest) -> None:
    sizes = sizes_in(files)
    needed = {INDEX_NAME: manifest.index.num_bytes}
    needed |= {part_name(process): part.num_bytes for process, part in enumerate(manifest.parts)}
    found = _data_files(sizes.items())
    wrong = [name for name, num_bytes in needed.items() if sizes.get(name) != num_bytes]
    wrong += [
        f"data files of process {process}"
        for process, part in enumerate(manifest.parts)
        if found.get(process, (0, 0)) != (part.num_files, part.data_bytes)
    ]
    if wrong:
        raise DamagedError(f"{directory}: missing or of another size: {wrong[0]}.", read=str(sorted(sizes.items())))


def _data_files(sizes: Iterable[tuple[str, int]]) -> dict[int, tuple[int, int]]:
    """The number and the bytes of the data files of each process."""
    found: dict[int, tuple[int, int]] = {}
    for name, num_bytes in sizes:
        if match := DATA_NAME.fullmatch(name):
            process = int(match.group(1))
            count, total = found.get(process, (0, 0))
            found[process] = count + 1, total + num_bytes
    return found

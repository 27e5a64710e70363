"""The folder of a run's checkpoints in an object store, which has no rename, no lock and no links.

OUT/checkpoints/step-00000010/manifest.json              written last: without it there is no checkpoint
                              5f0c9a17-81d2e044/...      all other files; the manifest names this folder
                              9d12c0b7-4be07f12/...      an attempt of another run that is under way, was refused or was killed
                              manifest.json.damaged-...  the manifest of a checkpoint that was set aside, with its folder

An attempt to save has a folder of its own, ``run-attempt``. So two runs that save one step never write the same object, and the
one whose manifest comes second is refused. A step without such folders was copied here from a file system.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from shardwright.checkpoint.folder.names import STEP, saved_before
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.fields import MAX_JSON_BYTES
from shardwright.checkpoint.format.manifest import FILE_NAME, Manifest, manifest_text
from shardwright.checkpoint.format.read_manifest import ATTEMPT, read_manifest
from shardwright.storage.asking import read_settled, settled
from shardwright.storage.files import each, exists
from shardwright.storage.objects import Entry, entries, entries_below, put, put_new, read, remove
from shardwright.storage.url import Url

ASIDE = re.compile(re.escape(FILE_NAME) + r"\.(damaged|set-aside)-[0-9a-f]{8}")
QUIET_FOR = timedelta(minutes=30)
"""So long an attempt may write nothing and live: an upload is seen when it is complete."""
DEAD_AFTER = timedelta(hours=24)
"""An attempt of another run, of which nothing was written for so long, is taken for killed."""


class UnknownOutcomeError(CheckpointError):
    """A manifest was sent to a store that then could not be asked whether it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What is in a folder of checkpoints besides them: ``leftovers`` and what is ``unknown``, by name. ``written``: when the store got the
    last object of a step's folder, by its own clock, where it says that."""

    leftovers: tuple[Url, ...]
    unknown: tuple[Url, ...]
    written: tuple[datetime, ...]


class InStore:
    """A ``Steps``."""

    locks = False

    def committed(self, checkpoints: Url, *, once: bool) -> tuple[Url, ...]:
        """Those with a manifest. A listing that leaves out the newest step would make a run go on from an older one."""
        with _explained(checkpoints):
            listed = partial(entries, checkpoints)
            steps = _steps(listed() if once else settled(checkpoints, listed))
            is_there = exists if once else _exists
            there = each(checkpoints, lambda name: is_there(checkpoints / name / FILE_NAME), steps)
            found = [checkpoints / name for name, known in zip(steps, there, strict=True) if known]
        return tuple(sorted(found, key=_step, reverse=True))

    def leftovers(self, checkpoints: Url) -> tuple[Url, ...]:
        return _found_in(checkpoints).leftovers

    def under_way(self, leftovers: Sequence[Url]) -> tuple[Url, ...]:
        """By the time of the last object, as the store gives it, and the clock of this machine."""
        if not leftovers:
            return ()
        with _explained(leftovers[0].parent):
            written = each(leftovers[0], lambda leftover: _last(_files_of(leftover)), leftovers)
            now = datetime.now(UTC)
            return tuple(
                leftover
                for leftover, last in zip(leftovers, written, strict=True)
                if last and now - last[0] < QUIET_FOR
            )

    def unknown(self, checkpoints: Url) -> tuple[Url, ...]:
        return _found_in(checkpoints).unknown

    def has_manifest(self, directory: Url) -> bool:
        with _explained(directory):
            return _exists(directory / FILE_NAME)

    def is_gone(self, directory: Url) -> bool:
        return not self.has_manifest(directory)

    def beside(self, step: Url) -> frozenset[Url]:
        """Other attempts to save it, and checkpoints of it that were set aside."""
        there = entries(step)
        aside = [one.name for one in there if ASIDE.fullmatch(one.name)]
        attempts = [one.name for one in there if one.is_folder and ATTEMPT.fullmatch(one.name)]
        # The files of one that was copied here, and set aside, are beside its manifest.
        used = _folders_in_use(step, aside)
        copied = used is None or "" in used
        files = [one.name for one in there if copied and not one.is_folder and one.name != FILE_NAME]
        return frozenset(step / name for name in (*aside, *attempts, *files))

    def delete(self, step: Url) -> None:
        """First its manifest, so that a deletion that is killed leaves no checkpoint."""
        used = _folders_in_use(step, [FILE_NAME])
        if not used:
            raise OSError(errno.EIO, "its manifest is missing or damaged", str(step))
        remove([step / FILE_NAME])
        for folder in used:
            if folder:
                _remove_below(step / folder)
            else:
                remove([step / one.name for one in _files_of(step)])

    def set_aside(self, step: Url, why: str) -> Url:
        """Gives the manifest another name, which it returns: all files stay."""
        manifest = step / FILE_NAME
        aside = step / f"{FILE_NAME}.{why}-{secrets.token_hex(4)}"
        try:
            data = read_settled(manifest, MAX_JSON_BYTES)
            put(aside, data)
            if read_settled(aside, MAX_JSON_BYTES) != data:
                raise OSError(errno.EIO, "the store does not have of it what was written", str(aside))
            remove([manifest])
        except OSError as error:
            raise CheckpointError(f"{step}: its manifest cannot be renamed: {error.strerror}.") from error
        return aside

    @contextmanager
    def saving(self, final: Url, run: str | None) -> Iterator[Url]:
        """``run``: eight hex digits, of the run that alone saves under them."""
        _remove_dead(final.parent, run)
        if exists(final / FILE_NAME):
            raise saved_before(final)
        attempt = final / f"{run or secrets.token_hex(4)}-{secrets.token_hex(4)}"
        try:
            yield attempt
        except UnknownOutcomeError:
            # The store may have the manifest, which names what was written.
            raise
        except BaseException:
            # What cannot be deleted now has no manifest, and a later save deletes it.
            with suppress(OSError):
                _abandon(attempt)
            raise
        # Only where the block ended without a commit.
        with suppress(OSError):
            _abandon(attempt)

    def joined(self, final: Url, name: str) -> Url | None:
        return final / name if ATTEMPT.fullmatch(name) else None

    def publish(self, directory: Url, final: Url, manifest: Manifest, needless: Sequence[Url]) -> None:
        """The files stay where they are, and the manifest, which is written last, names their folder."""
        remove(needless)
        try:
            _publish(final, manifest_text(replace(manifest, folder=directory.name)).encode())
        except FileExistsError:
            raise saved_before(final) from None
        try:
            read_manifest(final)
        except DamagedError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"{final}: this checkpoint is complete, and could not be read back: {error.message} Go on with --resume."
            ) from error

    def make_durable(self, final: Url) -> None:
        """It is."""

    def failure(self, final: Url, error: OSError) -> CheckpointError:
        # The object that it is about, where it is another one than those of this checkpoint.
        named = str(error.filename) if isinstance(error.filename, str) else ""
        where = f" ({named})" if named and not named.startswith(str(final)) else ""
        return CheckpointError(
            f"{final}: this checkpoint could not be written: {error.strerror or error}{where}. "
            f"Without a manifest it is none, and earlier checkpoints are as they were."
        )


@contextmanager
def _explained(url: Url) -> Iterator[None]:
    """Turns an error of the store into one message about ``url``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{url}: cannot be read: {error.strerror or error}.") from error


def _found_in(checkpoints: Url) -> _Found:
    """Raises CheckpointError where the store cannot be read."""
    with _explained(checkpoints):
        there = entries(checkpoints)
        found = [checkpoints / name for name in _steps(there)]
        inside = list(zip(found, each(checkpoints, entries, found), strict=True))
        left = each(checkpoints, lambda pair: _leftovers(*pair), inside)
        return _Found(
            leftovers=tuple(sorted(one for each_step in left for one in each_step)),
            unknown=tuple(checkpoints / one.name for one in there if not (one.is_folder and STEP.fullmatch(one.name))),
            written=_last(one for _, items in inside for one in items),
        )


def _publish(final: Url, data: bytes) -> None:
    """Write the manifest of a step, unless it has one: then raises FileExistsError.

    Raises UnknownOutcomeError where the store has not answered, and nobody knows whether it has the manifest.
    """
    manifest = final / FILE_NAME
    try:
        put_new(manifest, data)
        return
    except FileExistsError:
        # Of a request that was repeated because its answer was lost, the first has written it.
        if read(manifest, MAX_JSON_BYTES) == data:
            return
        raise
    except PermissionError:
        raise
    except OSError as error:
        sent = error
    try:
        if read(manifest, MAX_JSON_BYTES) == data:
            return
    except OSError:
        pass
    raise UnknownOutcomeError(
        f"{final}: it is not known whether this checkpoint was written: {sent.strerror or sent}. Nothing of it was deleted. See "
        f"whether it is there with shardwright ckpt verify {final}, and go on with --resume."
    ) from sent


def _abandon(attempt: Url) -> None:
    """Delete what an attempt has written, unless its step's manifest names it, or may. Raises OSError."""
    used = _folders_in_use(attempt.parent, [FILE_NAME])
    if used is not None and attempt.name not in used:
        _remove_below(attempt)


def _remove_dead(checkpoints: Url, run: str | None) -> None:
    """Delete the leftovers of ``run``, and those of others of which nothing was written for ``DEAD_AFTER`` before the last object of the
    folder. Raises OSError.

    Only times of the store are compared: by the clock of a machine that is a day fast every attempt under way would be dead.
    """
    found = _found_in(checkpoints)
    below = {leftover: _files_of(leftover) for leftover in found.leftovers}
    last = max((*found.written, *(time for files in below.values() for time in _last(files))), default=None)
    for leftover, files in below.items():
        of_ours = run is not None and leftover.name.startswith(f"{run}-")
        dead = of_ours or (last is not None and any(last - time > DEAD_AFTER for time in _last(files)))
        if dead and _is_leftover(leftover):
            remove([leftover / one.name for one in files])


def _leftovers(step: Url, items: tuple[Entry, ...]) -> list[Url]:
    attempts = [one.name for one in items if one.is_folder and ATTEMPT.fullmatch(one.name)]
    files = [one.name for one in items if not one.is_folder]
    manifests = [name for name in files if name == FILE_NAME or ASIDE.fullmatch(name)]
    if not manifests:
        return [step / name for name in attempts] + ([step] if files else [])
    if files == [FILE_NAME] and len(attempts) == 1:
        return []
    used = _folders_in_use(step, manifests)
    return [] if used is None else [step / name for name in attempts if name not in used]


def _is_leftover(directory: Url) -> bool:
    """Whether a step is without a manifest, or no manifest of its step names an attempt, by more than one answer. Raises OSError."""
    step = directory if STEP.fullmatch(directory.name) else directory.parent
    names = settled(step, lambda: [entry.name for entry in entries(step) if not entry.is_folder])
    manifests = {FILE_NAME, *(name for name in names if ASIDE.fullmatch(name))}
    used = _folders_in_use(step, manifests)
    return used is not None and (directory.name not in used if step != directory else not used)


def _exists(manifest: Url) -> bool:
    """Whether a step has a manifest. That it has none, and an error, are not believed at once."""
    with suppress(OSError):
        if exists(manifest):
            return True
    return settled(manifest, lambda: exists(manifest))


def _folders_in_use(step: Url, manifests: Iterable[str]) -> frozenset[str] | None:
    """The folders that manifests of a step name, the empty name for one that names none. Raises OSError.

    None where a damaged one may name any.
    """
    found: set[str] = set()
    for name in manifests:
        try:
            # What no manifest names is deleted: one answer is not enough.
            folder = json.loads(read_settled(step / name, MAX_JSON_BYTES)).get("folder", "")
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError, AttributeError):
            return None
        if folder != "" and not (isinstance(folder, str) and ATTEMPT.fullmatch(folder)):
            return None
        found.add(folder)
    return frozenset(found)


def _files_of(leftover: Url) -> list[Entry]:
    """The objects of a leftover: of an attempt all of them; of a step without a manifest those directly in it."""
    if STEP.fullmatch(leftover.name):
        return [one for one in entries(leftover) if not one.is_folder and not ASIDE.fullmatch(one.name)]
    return list(entries_below(leftover))


def _remove_below(folder: Url) -> None:
    remove([folder / one.name for one in entries_below(folder)])


def _last(objects: Iterable[Entry]) -> tuple[datetime, ...]:
    """When the last of these objects was written, by the store's clock. Nothing where it does not say so of each."""
    times = [one.modified for one in objects if not one.is_folder]
    known = [time for time in times if time is not None]
    return (max(known),) if known and len(known) == len(times) else ()


def _steps(items: Iterable[Entry]) -> list[str]:
    return [one.name for one in items if one.is_folder and STEP.fullmatch(one.name)]


def _step(step: Url) -> int:
    return int(step.name.removeprefix("step-"))

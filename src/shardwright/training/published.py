"""What was published with weights, and is no weight of the model: names in a checkpoint, and files in a run's folder.

OUT/published/tokenizer.json    the files that came with the weights, as they were

An import writes them, a run that begins with these weights copies them, and an export writes them again.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.storage.files import exists, read_regular, remove_files, sizes_in, write_small
from shardwright.storage.url import Place, Url

FOLDER = "published"
TOKENIZER = "tokenizer.json"
"""The tokenizer that a run reads."""

TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
OTHER_FILES = ("generation_config.json",)

KEPT = "published."
"""Before the names of tensors that are kept with weights: layers that the model does not have, under their published names."""

METADATA = "hugging_face"
"""The field of a checkpoint's metadata with what an export needs: the configuration, and how experts were held."""

CHECKPOINTS = "checkpoints"

MAX_BYTES = 1 << 30
"""Of a file that is copied to or from an object store."""


def published_folder(weights: Place) -> Place:
    """Where the files are that were published with weights: a run's folder, a step's directory, or a model folder.

    A folder of an object store is that of a run or of a step.

    >>> published_folder(Path("run/checkpoints/step-00000010")).as_posix()
    'run/published'
    """
    if isinstance(weights, Url):
        return (weights.parent.parent if weights.parent.name == CHECKPOINTS else weights) / FOLDER
    if Path(os.path.abspath(weights)).parent.name == CHECKPOINTS:
        return Path(os.path.normpath(weights / ".." / ".." / FOLDER))
    return weights / FOLDER if (weights / CHECKPOINTS).is_dir() else weights


def published_with(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint's metadata that belong to its weights, wherever they go."""
    return {METADATA: metadata[METADATA]} if METADATA in metadata else {}


def found(folder: Place, names: Sequence[str]) -> tuple[str, ...]:
    """Those files that a folder has. Raises InputError for a store that cannot be read."""
    if isinstance(folder, Url):
        try:
            there = sizes_in(folder)
        except OSError as error:
            raise InputError(f"{folder}: cannot be read: {error.strerror or error}.") from None
        return tuple(name for name in names if name in there)
    return tuple(name for name in names if (folder / name).is_file())


@contextmanager
def copied(source: Place, target: Place, names: Sequence[str]) -> Iterator[None]:
    """Files of a folder in another one, which is made where it is missing. Each appears complete, and replaces one of its name.

    Those that are new are deleted again if the block fails. Raises InputError for a file that cannot be read or written.
    """
    made, new = False, list(names)
    try:
        try:
            if names:
                made, new = not exists(target), [name for name in names if not exists(target / name)]
            for name in names:
                if isinstance(target, Path):
                    target.mkdir(parents=True, exist_ok=True)
                _copy(source / name, target / name)
        except OSError as error:
            raise InputError(f"{error.filename or target}: cannot be copied: {error.strerror or error}.") from None
        yield
    except BaseException:
        with suppress(OSError):
            remove_files(target / name for name in new if exists(target / name))
            if made and isinstance(target, Path):
                target.rmdir()
        raise


def _copy(source: Place, target: Place) -> None:
    if isinstance(target, Url):
        write_small(target, read_regular(source, MAX_BYTES))
        return
    temporary = target.with_name(f".shardwright-{secrets.token_hex(8)}")
    try:
        if isinstance(source, Url):
            temporary.write_bytes(read_regular(source, MAX_BYTES))
        else:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

"""What was published with weights, and is no weight of the model: names in a checkpoint, and files in a run's folder.

OUT/published/tokenizer.json    the files that came with the weights, as they were

An import writes them, a run that begins with these weights copies them, and an export writes them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.storage.files import (
    exists,
    files_in,
    make_folder,
    read_regular,
    remove_files,
    remove_folder,
    replace_file,
)
from shardwright.storage.url import Place, local_path

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
"""Of a file that is copied."""


def published_folder(weights: Place) -> Place:
    """Where the files are that were published with weights: a run's folder, a step's directory, or a model folder.

    A folder of an object store is that of a run or of a step.

    >>> published_folder(Path("run/checkpoints/step-00000010")).as_posix()
    'run/published'
    """
    path = local_path(weights)
    if path is None:
        return (weights.parent.parent if weights.parent.name == CHECKPOINTS else weights) / FOLDER
    if Path(os.path.abspath(path)).parent.name == CHECKPOINTS:
        return Path(os.path.normpath(path / ".." / ".." / FOLDER))
    return path / FOLDER if (path / CHECKPOINTS).is_dir() else path


def published_with(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint's metadata that belong to its weights, wherever they go."""
    return {METADATA: metadata[METADATA]} if METADATA in metadata else {}


def found(folder: Place, names: Sequence[str]) -> tuple[str, ...]:
    """Those files that a folder has. Raises InputError for a store that cannot be read."""
    try:
        return files_in(folder, names)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}.") from None


@contextmanager
def copied(source: Place, target: Place, names: Sequence[str], *, instead_of: Sequence[str] = ()) -> Iterator[None]:
    """Files of a folder in another one, which is made where it is missing. Each appears complete, and replaces one of its name.

    ``instead_of``: names that belong to the same weights: files of other weights are deleted. If the block fails, all files are as they
    were. Raises InputError for a file that cannot be read or written.
    """
    made, before = False, dict[str, bytes]()
    try:
        try:
            made = bool(names) and not exists(target)
            there = files_in(target, list(dict.fromkeys((*names, *instead_of))))
            before = {name: read_regular(target / name, MAX_BYTES) for name in there}
            remove_files([target / name for name in there if name not in names])
            for name in names:
                make_folder(target)
                replace_file(target / name, read_regular(source / name, MAX_BYTES))
        except OSError as error:
            raise InputError(f"{error.filename or target}: cannot be copied: {error.strerror or error}.") from None
        yield
    except BaseException:
        with suppress(OSError):
            remove_files([target / name for name in names if name not in before and exists(target / name)])
            for name, data in before.items():
                replace_file(target / name, data)
            if made:
                remove_folder(target)
        raise


def keep_tokenizer(tokenizer: Place, target: Place) -> bool:
    """Put the tokenizer of a run in a folder, in place of another one and of the files that belong to that. False where it is there.

    Raises InputError for a file that cannot be read or written.
    """
    try:
        text, there = read_regular(tokenizer, MAX_BYTES), target / TOKENIZER
        if exists(there) and read_regular(there, MAX_BYTES) == text:
            return False
        make_folder(target)
        remove_files([target / name for name in TOKENIZER_FILES if name != TOKENIZER and exists(target / name)])
        replace_file(there, text)
    except OSError as error:
        raise InputError(f"{error.filename or target}: cannot be copied: {error.strerror or error}.") from None
    return True

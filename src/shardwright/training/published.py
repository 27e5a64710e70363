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


def published_folder(weights: Path) -> Path:
    """Where the files are that were published with weights: a run's folder, a step's directory, or a model folder.

    >>> published_folder(Path("run/checkpoints/step-00000010")).as_posix()
    'run/published'
    """
    if Path(os.path.abspath(weights)).parent.name == CHECKPOINTS:
        return Path(os.path.normpath(weights / ".." / ".." / FOLDER))
    return weights / FOLDER if (weights / CHECKPOINTS).is_dir() else weights


def published_with(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint's metadata that belong to its weights, wherever they go."""
    return {METADATA: metadata[METADATA]} if METADATA in metadata else {}


def found(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Those files that a folder has."""
    return tuple(name for name in names if (folder / name).is_file())


@contextmanager
def copied(source: Path, target: Path, names: Sequence[str]) -> Iterator[None]:
    """Files of a folder in another one, which is made where it is missing. Each appears complete, and replaces one of its name.

    Those that are new are deleted again if the block fails. Raises InputError for a file that cannot be read or written.
    """
    made, new = not target.exists(), [name for name in names if not (target / name).exists()]
    try:
        try:
            for name in names:
                target.mkdir(parents=True, exist_ok=True)
                _copy(source / name, target / name)
        except OSError as error:
            raise InputError(f"{error.filename or target}: cannot be copied: {error.strerror or error}.") from None
        yield
    except BaseException:
        with suppress(OSError):
            for name in new:
                (target / name).unlink(missing_ok=True)
            if made:
                target.rmdir()
        raise


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".shardwright-{secrets.token_hex(8)}")
    try:
        shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

"""The files of a model folder that are kept beside its weights: the tokenizer and what generation needs."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.checkpoint.format.fields import parse_json
from shardwright.core.findings.errors import InputError
from shardwright.files.text import read_text
from shardwright.training.published import OTHER_FILES, TOKENIZER, TOKENIZER_FILES, found


def files_beside(folder: Path, vocabulary: int) -> tuple[str, ...]:
    """The names of these files that a folder has.

    Raises InputError for one that is no file, and for a tokenizer with more ids than the model's vocabulary.
    """
    known = (*TOKENIZER_FILES, *OTHER_FILES)
    names = found(folder, known)
    for name in known:
        # As the link of a download that was not completed.
        if name not in names and os.path.lexists(folder / name):
            raise InputError(f"{folder / name}: not a regular file. Fetch it again, or move it away.")
    if TOKENIZER in names:
        num = num_ids(folder / TOKENIZER)
        if num > vocabulary:
            raise InputError(
                f"{folder / TOKENIZER}: it has ids up to {num - 1:,}, and the model's vocabulary is {vocabulary:,}. Replace it "
                f"by the model's own tokenizer, or move it away."
            )
    return names


def num_ids(path: Path) -> int:
    """One more than the largest id of a tokenizer.json. Raises InputError for a file that is none."""
    top = parse_json(read_text(path).encode(), path).value
    model = top.get("model") if isinstance(top, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(top, dict):
        raise InputError(f"{path}: not a tokenizer.json: 'model' has no 'vocab'.")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    added = top.get("added_tokens")
    ids += [one.get("id") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return 1 + max((number for number in ids if isinstance(number, int)), default=-1)

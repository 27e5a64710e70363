"""Policies of recomputation, given as a text or by the path of a file."""

from __future__ import annotations

from pathlib import Path

from shardwright.core.policies.policy import read_policy
from shardwright.core.policies.reading import read_policy_file
from shardwright.files import read_yaml


def load_policy(text_or_path: str | Path, option: str = "remat") -> str:
    """The text of a policy (``core/policies/policy.py``), or of that in a file.

    A path ends in .yaml or .yml, or contains a folder. Raises InputError for a text that is no policy, and for a file that does not
    exist, cannot be read, or has none. ``option``: where it was given, for the error.
    """
    text = str(text_or_path)
    if is_file(text):
        return read_policy_file(read_yaml(text)).text
    read_policy(text, option)
    return text


def is_file(text: str) -> bool:
    """Whether a text is the path of a policy's file."""
    return text.endswith((".yaml", ".yml")) or "/" in text

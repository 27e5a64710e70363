"""The presets, each a few lines of YAML in this folder, and loading of a user's own layout file.

recipe_file.py  recipes of low precision by name, and loading of a user's own file
policy_file.py  policies of recomputation, given as a text or by the path of a file
"""

from __future__ import annotations

from pathlib import Path

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.files import parse_yaml, read_yaml
from shardwright.layouts.policy_file import load_policy
from shardwright.layouts.recipe_file import load_recipe

__all__ = ["FOLDER", "load_layout", "load_policy", "load_recipe", "preset_names"]

FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """The names of the presets, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_layout(name_or_path: str | Path) -> Layout:
    """A preset by its name, or a user's own layout by the path of its file.

    A path ends in .yaml or .yml, or contains a folder. Raises InputError for an unknown name or a file that does not exist
    or cannot be read, and FindingsError for a file that is not a layout.
    """
    text = str(name_or_path)
    if text in preset_names():
        return read_layout(parse_yaml((FOLDER / f"{text}.yaml").read_text(encoding="utf-8"), f"{text}.yaml"))
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return read_layout(read_yaml(text), name=Path(text).stem)
    raise InputError(
        f"no layout is called '{text}'. {did_you_mean(text, preset_names())} "
        f"A layout of your own is given by its path, as in ./{text}.yaml."
    )

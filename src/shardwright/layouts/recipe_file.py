"""Recipes of low precision by name, and loading of a user's own file."""

from __future__ import annotations

from pathlib import Path

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.reading import read_recipe
from shardwright.core.recipes.recipe import Recipe
from shardwright.files import read_yaml


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by its name, or a user's own by the path of its file.

    A path ends in .yaml or .yml, or contains a folder. Raises InputError for an unknown name, and for a file that does not
    exist, cannot be read, or is no recipe.
    """
    text = str(name_or_path)
    if text in PRESETS:
        return preset(text)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return read_recipe(read_yaml(text))
    raise InputError(
        f"no recipe is called '{text}'. {did_you_mean(text, PRESETS)} "
        f"A recipe of your own is given by its path, as in ./{text}.yaml."
    )

"""The recipe of a module with delayed amaxes, as a buffer of its text: a checkpoint of another recipe has other histories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch

from shardwright.core.recipes.recipe import Recipe
from shardwright.core.recipes.shown import recipe_text

RECIPE_BYTES = 256


@runtime_checkable
class NoticesLoads(Protocol):
    """A module with a state that follows from what was loaded in place."""

    def notice_load(self, is_loaded: Callable[[torch.Tensor], bool]) -> None: ...


def text_of(recipe: Recipe) -> str:
    """The recipe in one line, shortened to the bytes that a buffer has."""
    text = recipe_text(recipe)
    if len(text.encode()) <= RECIPE_BYTES:
        return text
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return text.encode()[: RECIPE_BYTES - 20].decode(errors="ignore") + f"... {digest}"


def shown(recipe: torch.Tensor) -> str:
    """The text in a buffer."""
    return bytes(recipe.tolist()).rstrip(b"\0").decode(errors="replace")


def other_recipe(name: str, theirs: str, ours: str) -> str:
    return (
        f"'{name}': the checkpoint is of a module with the recipe '{theirs}', and this one has '{ours}'. Its factors and histories "
        f"would mean something else. Construct the module with the recipe of the checkpoint, or load its weights only."
    )


def other_codes(name: str, theirs: str, ours: str) -> str:
    return (
        f"'{name}': the checkpoint has weights that rest as the codes of '{theirs}', and this module's are those of '{ours}'. Construct the "
        f"module with the recipe of the checkpoint, or load its main weights only, by leaving out all names with 'resting.'."
    )


BY_RECIPE: Mapping[str, Callable[[str, str, str], str]] = {
    "delayed.recipe": other_recipe,
    "resting.recipe_text": other_codes,
}
"""How the names of tensors with a recipe's text end in a module's state, and what is said of that of another recipe: by its name, its text
and that of the module."""

"""``autocast``: the recipe of modules that are constructed inside of it, and that which modules called inside of it must have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.recipes.shown import recipe_text
from shardwright.engine_torch.modules.parts.precision import recipe_of


class _Inside:
    """``recipe``: None outside, or where it is not enabled; ``active``: inside of one."""

    active = False
    recipe: Recipe | None = None


# Not a context variable: a program that is compiled reads it.
_INSIDE = _Inside()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: object = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """As Transformer Engine's: modules that are constructed inside of it have the recipe, by default delayed scaling.

    A module here has its recipe from its constructor on, with the state that belongs to it. So one that is called inside must have this recipe,
    and with ``enabled=False`` none; another one is refused with what to do.

    >>> from shardwright.engine_torch.modules import Linear
    >>> with autocast(recipe="mxfp8"):
    ...     layer = Linear(32, 32)
    >>> layer.recipe.name
    'mxfp8'
    """
    for name, value in (("calibrating", calibrating), ("amax_reduction_group", amax_reduction_group)):
        if value:
            fix = "give amax_group to the modules" if name == "amax_reduction_group" else "leave it out"
            raise InputError(f"autocast: {name}={value!r} is Transformer Engine's, and is not done here: {fix}.")
    before = (_INSIDE.active, _INSIDE.recipe)
    _INSIDE.active, _INSIDE.recipe = True, recipe_of("fp8-delayed" if recipe is None else recipe) if enabled else None
    try:
        yield
    finally:
        _INSIDE.active, _INSIDE.recipe = before


def recipe_inside(recipe: Any, module: str) -> Any:
    """The recipe of a module that is constructed now: its own, or that of ``autocast``. Raises InputError for another one than that."""
    if recipe is None or not _INSIDE.active:
        return recipe if recipe is not None else _INSIDE.recipe
    require_recipe(recipe_of(recipe), module)
    return recipe


def require_recipe(recipe: Recipe | None, label: str) -> None:
    """Raises InputError for a module of another recipe than that of the ``autocast`` around a call."""
    if _INSIDE.active and recipe != _INSIDE.recipe:
        theirs, ours = (recipe_text(side) if side else "none" for side in (_INSIDE.recipe, recipe))
        raise InputError(
            f"{label}: autocast has the recipe '{theirs}', and it was constructed with '{ours}'. A module has the recipe of its constructor: "
            f"give it recipe=, or construct it inside of autocast."
        )

"""``autocast``, and ``fp8_autocast``, as it was called before: the recipe of modules that are constructed inside of it, and that which modules called inside of it must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    _refuse("autocast", {"calibrating": calibrating, "amax_reduction_group": amax_reduction_group})
    with _inside(enabled, recipe):
        yield


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: object = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """``autocast`` under the name and with the arguments that Transformer Engine had before it."""
    _refuse("fp8_autocast", {"calibrating": calibrating, "fp8_group": fp8_group})
    with _inside(enabled, fp8_recipe):
        yield


def _refuse(context: str, arguments: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if value:
            fix = "leave it out" if name == "calibrating" else "give amax_group to the modules"
            raise InputError(f"{context}: {name}={value!r} is Transformer Engine's, and is not done here: {fix}.")


@contextmanager
def _inside(enabled: bool, recipe: object) -> Iterator[None]:
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

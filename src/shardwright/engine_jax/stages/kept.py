"""What a layer keeps of a live microbatch besides its input, as its policy of recomputation says.

``jax.vjp`` makes a function of arrays: of those that the policy keeps, and of what the layer began with. The former come from the
forward pass of another tick. So the backward pass traces the layer again, with the kept arrays in their places: what would
make them is read by nothing then, and no compiler keeps it.

S slots for live microbatches, N layers of a stage, B rows, L tokens, M embed. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var

Pull = Callable[[Any], Any]


class Live(NamedTuple):
    """What a device keeps of its live microbatches, with S slots and N layers of a stage along the leading dims: the inputs of all layers, and
    by stack what its policy keeps besides."""

    inputs_SNBLM: jax.Array
    kept: Mapping[str, Sequence[jax.Array]]


class Places(NamedTuple):
    """Of the arrays of a backward pass, the first of each that are kept; ``of_leaf``: for each array, which of these it is, or None."""

    first: Sequence[int]
    of_leaf: Sequence[int | None]


def kept_places(pull_of: Callable[[jax.Array], Pull], x: jax.Array | jax.ShapeDtypeStruct) -> Places:
    """Which arrays of the backward pass of a layer are made of its input ``x``. All others follow from its weights and from what all layers
    have of a microbatch, which are there in the backward pass too. ``pull_of``: from an input, as of ``jax.vjp``."""
    jaxpr = jax.make_jaxpr(lambda x: jax.tree.leaves(pull_of(x)))(x).jaxpr
    (of_input,) = jaxpr.invars
    made = {of_input}
    for step in jaxpr.eqns:
        if any(isinstance(one, Var) and one in made for one in step.invars):
            made.update(step.outvars)
    first: dict[Var, int] = {}
    for number, one in enumerate(jaxpr.outvars):
        if isinstance(one, Var) and one in made and one is not of_input:
            first.setdefault(one, number)
    # Layers that are quantized in other ways keep the same arrays, in another order.
    order = sorted(first, key=lambda one: str(one.aval))
    return Places(
        first=[first[one] for one in order],
        of_leaf=[order.index(one) if isinstance(one, Var) and one in first else None for one in jaxpr.outvars],
    )


def arrays_to_keep(pull: Pull, places: Places) -> Sequence[jax.Array]:
    """The arrays of a backward pass that are kept."""
    leaves = jax.tree.leaves(pull)
    return [leaves[number] for number in places.first]


def with_kept(pull: Pull, kept: Sequence[jax.Array], places: Places) -> Pull:
    """The backward pass with the arrays that were kept in place of those that were traced again."""
    leaves, tree = jax.tree.flatten(pull)
    taken = [leaf if which is None else kept[which] for leaf, which in zip(leaves, places.of_leaf, strict=True)]
    return jax.tree.unflatten(tree, taken)

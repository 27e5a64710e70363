"""An optimizer of optax by its name there: its state by the names of a checkpoint, found by evaluating shapes, and its update.

The gradients and the weights that it gets are mappings by the table's names, with layers stacked. Under ``jit`` it sees full
arrays, so also one that needs norms of an entire weight gives the same numbers on every layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import Optimizer
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.training.named import OURS, PREFIX, constants_of, kept_of, no_such, other_dtype, other_shape, refused

Arrays = Mapping[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]

MOST_SHARED = 1024
"""Elements of state that belongs to no weight: a count of steps, coefficients, the key of a random generator."""


class Place(NamedTuple):
    """Where a leaf of optax's state is in ours: ``owner`` is its weight, or None for shared state, whose name is ``prefix``."""

    prefix: str
    owner: str | None


def described(name: str, settings: Mapping[str, str], shapes: Shapes) -> Optimizer:
    """The optimizer ``optax:name`` with its state. ``shapes``: of the trained weights, layers stacked.

    Raises InputError for a name or a constant that optax has not, and for state of a weight that has another shape.
    """
    factory = _factory(name)
    parameters = inspect.signature(factory).parameters
    constants = constants_of(f"optax:{name}", settings, parameters, given=("learning_rate",))
    optimizer = Optimizer(name=f"optax:{name}", constants=constants)
    weights = {weight: jax.ShapeDtypeStruct(shape, jnp.float32) for weight, shape in shapes.items()}
    try:
        state = jax.eval_shape(_made(optimizer, 1.0).init, weights)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        _, after = jax.eval_shape(lambda g, s, w, r: _made(optimizer, r).update(g, s, w), weights, state, weights, rate)
    # A user's choice runs here: whatever it raises is about the choice.
    except Exception as error:
        raise refused(optimizer, error) from None
    if jax.tree.structure(after) != jax.tree.structure(state) or _forms(after) != _forms(state):
        raise InputError(f"--optimizer {optimizer.name}: its state has another form after a step than before. {OURS}")
    places = _places(optimizer, state, shapes)
    leaves = jax.tree.leaves(state)
    owners: dict[tuple[str, str], set[str]] = {}
    for place, leaf in zip(places, leaves, strict=True):
        if place.owner is not None:
            owners.setdefault((place.prefix, str(leaf.dtype)), set()).add(place.owner)
    return Optimizer(
        name=optimizer.name,
        constants=constants,
        kept=kept_of(owners, shapes),
        shared={
            place.prefix: (tuple(leaf.shape), str(leaf.dtype))
            for place, leaf in zip(places, leaves, strict=True)
            if place.owner is None
        },
    )


def initial(optimizer: Optimizer, weights: Arrays) -> tuple[Mapping[str, Arrays], Arrays]:
    """What the optimizer keeps before the first step, and its shared state."""
    return _ours(optimizer, _made(optimizer, 1.0).init(cast(optax.Params, weights)), weights)


def changed(
    optimizer: Optimizer,
    gradients: Arrays,
    kept: Mapping[str, Arrays],
    shared: Arrays,
    weights: Arrays,
    rate: jax.Array,
) -> tuple[Arrays, Mapping[str, Arrays], Arrays]:
    """What to add to each weight, what is kept after the step, and the shared state after it."""
    made = _made(optimizer, rate)
    form = jax.eval_shape(made.init, cast(optax.Params, weights))
    places = _places(optimizer, form, {name: w.shape for name, w in weights.items()})
    leaves = [shared[p.prefix] if p.owner is None else kept[p.prefix][p.owner] for p in places]
    state = jax.tree.unflatten(jax.tree.structure(form), leaves)
    changes, after = made.update(cast(optax.Updates, gradients), state, cast(optax.Params, weights))
    return cast(Arrays, changes), *_ours(optimizer, after, weights)


def _ours(optimizer: Optimizer, state: Any, weights: Arrays) -> tuple[Mapping[str, Arrays], Arrays]:
    """The state of optax under our names."""
    kept: dict[str, dict[str, jax.Array]] = {one.prefix: {} for one in optimizer.kept}
    shared: dict[str, jax.Array] = {}
    places = _places(optimizer, state, {name: w.shape for name, w in weights.items()})
    for place, leaf in zip(places, jax.tree.leaves(state), strict=True):
        if place.owner is None:
            shared[place.prefix] = leaf
        else:
            kept[place.prefix][place.owner] = leaf
    return kept, shared


def _places(optimizer: Optimizer, state: Any, shapes: Shapes) -> list[Place]:
    """The place of each leaf, in their order. Raises InputError for one of a weight that has another shape."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        words, shape = [_word(key) for key in path], tuple(leaf.shape)
        last = words[-1] if words and isinstance(path[-1], jax.tree_util.DictKey) else ""
        weight = (last, shapes[last]) if last in shapes else None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise other_dtype(optimizer.name, ".".join(words), str(leaf.dtype))
        if weight is not None and shape == weight[1] and str(leaf.dtype) in DTYPE_BYTES:
            found.append(Place(f"{PREFIX}{'.'.join(words[:-1])}/", last))
        elif prod(shape) <= (1 if weight else MOST_SHARED):
            found.append(Place(PREFIX + ".".join(words), None))
        else:
            raise other_shape(optimizer.name, ".".join(words), shape, weight)
    return found


def _word(key: Any) -> str:
    """One part of the path to a leaf: a field's name, a key, or an index."""
    return str(next(getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)))


def _forms(state: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _made(optimizer: Optimizer, rate: Any) -> optax.GradientTransformation:
    """The transformation with this learning rate. Its own weight decay is 0: a run's is decoupled, the same for all optimizers."""
    factory = _factory(optimizer.name.partition(":")[2])
    own = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(factory).parameters else {}
    return factory(learning_rate=rate, **dict(optimizer.constants), **own)


def _factory(name: str) -> Callable[..., optax.GradientTransformation]:
    module, _, short = name.rpartition(".")
    where = {"": optax, "contrib": optax.contrib}.get(module)
    found = None if where is None else getattr(where, short, None)
    if not _takes_a_rate(found):
        known = [one for one in dir(optax) if _takes_a_rate(getattr(optax, one))]
        known += [f"contrib.{one}" for one in dir(optax.contrib) if _takes_a_rate(getattr(optax.contrib, one))]
        raise no_such("optax", name, known)
    return cast(Callable[..., optax.GradientTransformation], found)


def _takes_a_rate(found: object) -> bool:
    """Whether it makes an optimizer with a learning rate."""
    return inspect.isfunction(found) and "learning_rate" in inspect.signature(found).parameters

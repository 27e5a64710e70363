"""An optimizer of optax by its name there: its state by the names of a checkpoint, found by evaluating shapes, and its update.

The gradients and the weights that it gets are mappings by the table's names. Weights with layers in a stack are given as they are to
an optimizer that computes element by element, and layer by layer to any other: so a norm, a mean or a number of dims is that of a
layer's weight. Under ``jit`` it sees full arrays, so they are the same on every layout.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import Optimizer
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.engine_jax.training.elementwise import depends_on, treats_stacks_as_layers
from shardwright.training.named import OURS, PREFIX, constants_of, kept_of, no_such, other_dtype, other_shape, refused

Arrays = Mapping[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]

MOST_SHARED = 1024
"""Elements of state that belongs to no weight: a count of steps, coefficients, the key of a random generator."""


class Place(NamedTuple):
    """Where a leaf of optax's state is in ours: ``owner`` is its weight, or None for shared state, whose name is ``prefix``. ``layer``:
    its index in a stack of ours."""

    prefix: str
    owner: str | None
    layer: int | None


class Given(NamedTuple):
    """A weight as optax gets it: the weight, and which layer of it, or None for all."""

    weight: str
    layer: int | None


def described(name: str, settings: Mapping[str, str], shapes: Shapes, stacked: Collection[str] = ()) -> Optimizer:
    """The optimizer ``optax:name`` with its state. ``shapes``: of the trained weights; those in ``stacked`` have layers as dim 0.

    Raises InputError for a name or a constant that optax has not, and for state of a weight that has another shape.
    """
    factory = _factory(name)
    parameters = inspect.signature(factory).parameters
    constants = constants_of(f"optax:{name}", settings, parameters, given=("learning_rate",))
    optimizer = Optimizer(name=f"optax:{name}", constants=constants)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    # A user's choice runs here: whatever it raises is about the choice.
    try:
        split = _split(optimizer, shapes, stacked)
        weights = _forms_of(shapes, split)
        state = jax.eval_shape(_made(optimizer, 1.0).init, weights)
        begins_with_rate = depends_on(lambda r: _made(optimizer, r).init(_zeros(weights)), rate)
        _, after = jax.eval_shape(lambda g, s, w, r: _made(optimizer, r).update(g, s, w), weights, state, weights, rate)
    except Exception as error:
        raise refused(optimizer, error) from None
    if begins_with_rate:
        raise InputError(
            f"--optimizer {optimizer.name}: its state begins with the learning rate, which the schedule of a run changes in each step. {OURS}"
        )
    if jax.tree.structure(after) != jax.tree.structure(state) or _forms(after) != _forms(state):
        raise InputError(f"--optimizer {optimizer.name}: its state has another form after a step than before. {OURS}")
    places = _places(optimizer, state, shapes, split)
    leaves = jax.tree.leaves(state)
    owners: dict[tuple[str, str], set[str]] = {}
    shared: dict[str, tuple[tuple[int, ...], str]] = {}
    layers = Counter(place.prefix for place in places)
    for place, leaf in zip(places, leaves, strict=True):
        if place.owner is not None:
            owners.setdefault((place.prefix, str(leaf.dtype)), set()).add(place.owner)
        else:
            num = () if place.layer is None else (layers[place.prefix],)
            shared[place.prefix] = ((*num, *leaf.shape), str(leaf.dtype))
    return Optimizer(name=optimizer.name, constants=constants, kept=kept_of(owners, shapes), shared=shared)


def initial(
    optimizer: Optimizer, weights: Arrays, stacked: Collection[str] = ()
) -> tuple[Mapping[str, Arrays], Arrays]:
    """What the optimizer keeps before the first step, and its shared state."""
    shapes = _shapes(weights)
    split = _split(optimizer, shapes, stacked)
    state = _made(optimizer, 1.0).init(cast(optax.Params, _as_given(weights, split)))
    return _ours(optimizer, state, shapes, split)


def changed(
    optimizer: Optimizer,
    gradients: Arrays,
    kept: Mapping[str, Arrays],
    shared: Arrays,
    weights: Arrays,
    rate: jax.Array,
    stacked: Collection[str] = (),
) -> tuple[Arrays, Mapping[str, Arrays], Arrays]:
    """What to add to each weight, what is kept after the step, and the shared state after it."""
    made, shapes = _made(optimizer, rate), _shapes(weights)
    split = _split(optimizer, shapes, stacked)
    form = jax.eval_shape(made.init, cast(optax.Params, _forms_of(shapes, split)))
    leaves = []
    for place in _places(optimizer, form, shapes, split):
        array = shared[place.prefix] if place.owner is None else kept[place.prefix][place.owner]
        leaves.append(array if place.layer is None else array[place.layer])
    state = jax.tree.unflatten(jax.tree.structure(form), leaves)
    changes, after = made.update(
        cast(optax.Updates, _as_given(gradients, split)), state, cast(optax.Params, _as_given(weights, split))
    )
    by_weight = _joined({(one.weight, one.layer): cast(Arrays, changes)[key] for key, one in split.items()})
    return by_weight, *_ours(optimizer, after, shapes, split)


def _split(optimizer: Optimizer, shapes: Shapes, stacked: Collection[str]) -> Mapping[str, Given]:
    """What optax gets, by the names under which it does: each layer of a stack as a weight of its own, unless that changes nothing."""
    whole, stacked = {name: Given(name, None) for name in shapes}, [name for name in shapes if name in stacked]
    if not stacked or _treats_stacks_as_layers(optimizer, shapes, stacked):
        return whole
    layers = {f"{name}[{layer}]": Given(name, layer) for name in stacked for layer in range(shapes[name][0])}
    return {**{name: one for name, one in whole.items() if name not in stacked}, **layers}


def _treats_stacks_as_layers(optimizer: Optimizer, shapes: Shapes, stacked: Collection[str]) -> bool:
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    of_stacks = _structs(shapes)
    of_layers = _structs({name: shape[1:] if name in stacked else shape for name, shape in shapes.items()})
    init = _made(optimizer, 1.0).init
    states = [jax.eval_shape(init, weights) for weights in (of_stacks, of_layers)]
    if jax.tree.structure(states[0]) != jax.tree.structure(states[1]):
        return False
    return treats_stacks_as_layers(init, (of_stacks,), (of_layers,)) and treats_stacks_as_layers(
        lambda g, s, w, r: _made(optimizer, r).update(g, s, w),
        (of_stacks, states[0], of_stacks, rate),
        (of_layers, states[1], of_layers, rate),
    )


def _as_given(arrays: Arrays, split: Mapping[str, Given]) -> Arrays:
    return {
        key: arrays[one.weight] if one.layer is None else arrays[one.weight][one.layer] for key, one in split.items()
    }


def _joined(parts: Mapping[tuple[str, int | None], jax.Array]) -> Arrays:
    """Arrays by name, of arrays by name and layer."""
    layers: dict[str, dict[int, jax.Array]] = {}
    joined: dict[str, jax.Array] = {}
    for (name, layer), array in parts.items():
        if layer is None:
            joined[name] = array
        else:
            layers.setdefault(name, {})[layer] = array
    return joined | {name: jnp.stack([by_layer[n] for n in sorted(by_layer)]) for name, by_layer in layers.items()}


def _shapes(arrays: Arrays) -> Shapes:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _structs(shapes: Shapes) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _zeros(forms: Mapping[str, jax.ShapeDtypeStruct]) -> optax.Params:
    """Where it is traced, without memory."""
    return cast(optax.Params, {key: jnp.zeros(one.shape, one.dtype) for key, one in forms.items()})


def _forms_of(shapes: Shapes, split: Mapping[str, Given]) -> Mapping[str, jax.ShapeDtypeStruct]:
    return _structs({key: _given_shape(shapes, one) for key, one in split.items()})


def _given_shape(shapes: Shapes, weight: Given) -> tuple[int, ...]:
    shape = shapes[weight.weight]
    return shape if weight.layer is None else shape[1:]


def _ours(
    optimizer: Optimizer, state: Any, shapes: Shapes, split: Mapping[str, Given]
) -> tuple[Mapping[str, Arrays], Arrays]:
    """The state of optax under our names."""
    kept: dict[str, dict[tuple[str, int | None], jax.Array]] = {one.prefix: {} for one in optimizer.kept}
    shared: dict[tuple[str, int | None], jax.Array] = {}
    places = _places(optimizer, state, shapes, split)
    for place, leaf in zip(places, jax.tree.leaves(state), strict=True):
        if place.owner is None:
            shared[place.prefix, place.layer] = leaf
        else:
            kept[place.prefix][place.owner, place.layer] = leaf
    return {prefix: _joined(parts) for prefix, parts in kept.items()}, _joined(shared)


def _places(optimizer: Optimizer, state: Any, shapes: Shapes, split: Mapping[str, Given]) -> list[Place]:
    """The place of each leaf, in their order. Raises InputError for one of a weight that has another shape."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        words, shape = [_word(key) for key in path], tuple(leaf.shape)
        last = split.get(words[-1]) if words and isinstance(path[-1], jax.tree_util.DictKey) else None
        weight = None if last is None else (last.weight, _given_shape(shapes, last))
        layer = next((split[word].layer for word in words if word in split), None)
        words = [split[word].weight if word in split else word for word in words]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise other_dtype(optimizer.name, ".".join(words), str(leaf.dtype))
        if weight is not None and shape == weight[1] and str(leaf.dtype) in DTYPE_BYTES:
            found.append(Place(f"{PREFIX}{'.'.join(words[:-1])}/", weight[0], layer))
        elif prod(shape) <= (1 if weight else MOST_SHARED):
            found.append(Place(PREFIX + ".".join(words), None, layer))
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

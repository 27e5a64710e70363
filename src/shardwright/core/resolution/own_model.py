"""A user's own model as a table: shapes by name, and, by name patterns, a component and a logical name for each dim.

A description is ``component: dims``, as in ``attention: embed heads head_dim``. Dims are those of the shape, in its
order. ``layers`` may be first, for layers stacked along dim 0. The name of a dim that may not be sharded starts with an
underscore: ``_taps``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import SupportsIndex

from shardwright.core.findings.errors import InputError, NotationError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.roles import COMPONENTS, LOGICAL_AXES
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.notation import parse_with_places
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Activation, Contraction, Initializer, ModelTable, Weight
from shardwright.core.resolution.resolve import resolve_activation

STORAGE_FIRST = ("embed", "q_lora", "kv_lora")
"""The dims that are tried as storage dim before any other of a weight, as in our own tables."""

NOT_MADE_HERE = Initializer(kind="zeros")
"""A user's program makes its own initial values; our code does not read this."""


def table_of(
    shapes: Mapping[str, tuple[Sequence[int], str]],
    descriptions: Mapping[str, str],
    *,
    activations: Mapping[str, str] | None = None,
    units: Mapping[str, int] | None = None,
    name: str = "own",
) -> ModelTable:
    """The table of a program that is not ours.

    ``shapes``: shape and dtype of each weight by name. ``descriptions``: for each name pattern (``*`` stands for any
    text) a component and the logical name of each dim. ``activations``: the same by plain name, for activations that
    the plan is to include; their sizes are taken from the weights and the request. ``units``: for a logical axis that
    counts elements, how many elements form one unit that may not be split, as ``{"heads": 64}`` for a dim of heads x head_dim.

    Raises InputError for a weight that no pattern matches or that two describe differently, a different number of dims, an
    activation's dim without a single known size, an unknown component or logical axis, and a unit that does not divide.

    >>> table = table_of({"h/0/q": ((64, 4, 16), "float32"), "h/0/scale": ((64,), "float32")},
    ...                  {"*/q": "attention: embed heads head_dim", "*/scale": "residual: norm"})
    >>> [(w.name, w.component, w.storage) for w in table.weights]
    [('h/0/q', 'attention', ('embed', 'heads', 'head_dim')), ('h/0/scale', 'residual', ())]
    """
    parsed = {pattern: _parse(f"'{pattern}'", text) for pattern, text in descriptions.items()}
    weights = tuple(
        _in_units(_weight(key, *_shape_and_dtype(key, given), parsed), units or {}) for key, given in shapes.items()
    )
    counted = {axis for weight in weights for axis in weight.unit or {}}
    for axis in units or {}:
        if axis not in counted:
            raise InputError(f"units: no weight has a dim '{axis}'. {did_you_mean(axis, _sizes(weights))}")
    unused = [pattern for pattern in parsed if not any(_matches(key, pattern) for key in shapes)]
    if unused:
        raise InputError(f"pattern '{unused[0]}' matches no weight. {did_you_mean(unused[0], shapes)}")
    rows = tuple(
        Activation(name=key, component=component, logical_axes=axes)
        for key, text in (activations or {}).items()
        for component, axes in (_parse(f"activation '{key}'", text),)
    )
    sizes = _sizes(weights)
    if "experts" in sizes:
        sizes.setdefault("scores", sizes["experts"])
    for row in rows:
        _check_sizes_known(row, sizes)
    return ModelTable(
        family="own",
        owner="users",
        name=name,
        sizes=sizes,
        weights=weights,
        activations=rows,
        moves=(),
        num_layers=max((w.num for w in weights), default=1),
    )


def activation_spec(layout: Layout, mesh: Mesh, logical_axes: str, *, component: str) -> Spec:
    """The spec of one activation of a component under a layout, from the logical names of its dims.

    Raises InputError for an unknown component and for a mesh of another layout, NotationError for names that are not
    logical axes.
    """
    unknown = [axis for axis in mesh.names if axis not in layout.entries]
    if unknown:
        raise InputError(
            f"the mesh has an axis '{unknown[0]}', and layout '{layout.name}' has none. Give the mesh of a plan under it."
        )
    known, axes = _parse("the activation", f"{component}: {logical_axes}")
    return resolve_activation(known, axes, layout, mesh, frozenset(COMPONENTS))


def _parse(where: str, text: str) -> tuple[str, tuple[str, ...]]:
    component, colon, dims = text.partition(":")
    component = component.strip()
    if not colon:
        raise InputError(f"{where}: '{text}' is not 'component: dims', as in 'attention: embed heads head_dim'.")
    if component not in COMPONENTS:
        raise InputError(f"{where}: unknown component '{component}'. {did_you_mean(component, COMPONENTS)}")
    free = [word for word in dims.split() if word.startswith("_")]
    parsed = parse_with_places(dims.strip(), known_logical_axes=(*LOGICAL_AXES, *free))
    if parsed.spec.axes:
        start, stop = parsed.place_of(parsed.spec.dim_of(parsed.spec.axes[0]) or 0)
        raise NotationError(
            f"{where}: logical names only; the layout decides which mesh axes shard a dim",
            text=parsed.text,
            start=start,
            stop=stop,
        )
    return component, parsed.spec.logical_axes


def _weight(name: str, shape: Sequence[int], dtype: str, parsed: Mapping[str, tuple[str, tuple[str, ...]]]) -> Weight:
    matches = {pattern: description for pattern, description in parsed.items() if _matches(name, pattern)}
    if not matches:
        near = did_you_mean(name, parsed) if parsed else "There is no pattern at all."
        raise InputError(f"no pattern describes weight '{name}' of shape {tuple(shape)}. {near}")
    if len(set(matches.values())) > 1:
        raise InputError(
            f"weight '{name}' is described in {len(matches)} ways, by {', '.join(map(repr, matches))}. Leave one."
        )
    pattern, (component, axes) = next(iter(matches.items()))
    if len(axes) != len(shape):
        raise InputError(
            f"'{pattern}' names {len(axes)} dims ({' '.join(axes)}); weight '{name}' has {len(shape)}: {tuple(shape)}."
        )
    stacked = bool(axes) and axes[0] == "layers"
    if "layers" in axes[1:]:
        raise InputError(f"'{pattern}': 'layers' is first or absent; checkpoints and stages shard dim 0.")
    num, axes, shape = (shape[0], axes[1:], tuple(shape[1:])) if stacked else (1, axes, tuple(shape))
    return Weight(
        name=name,
        component=component,
        logical_axes=axes,
        shape=shape,
        initializer=NOT_MADE_HERE,
        contracted=_contracted(component, axes),
        storage=_storage(axes),
        num=num,
        stack="layers" if stacked else None,
        dtype=dtype,
    )


def _in_units(weight: Weight, units: Mapping[str, int]) -> Weight:
    """The weight with the units of its own dims."""
    own = {axis: elements for axis, elements in units.items() if axis in weight.logical_axes}
    for axis, elements in own.items():
        if elements < 1 or weight.size(axis) % elements:
            raise InputError(
                f"weight '{weight.name}' has {weight.size(axis)} elements along '{axis}', which units of {elements} do not "
                f"divide. Give the elements of one unit, as the width of a head."
            )
    return replace(weight, unit=own or None)


def _storage(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Every dim that may be sharded, the usual ones first. A weight of one dim is replicated at rest."""
    if len(axes) < 2:
        return ()
    free = [axis for axis in axes if not axis.startswith("_")]
    return tuple(sorted(free, key=lambda axis: (*STORAGE_FIRST, axis).index(axis)))


def _contracted(component: str, axes: tuple[str, ...]) -> tuple[Contraction, ...]:
    """The dims that are summed over in a weight's gradient: those of tokens, and those of what uses the weight's output.

    A weight of attention without heads (a down-projection, an inner norm) feeds all heads. A vector along ``embed`` comes
    after the heads: it is added to sums that are complete. The router's scores affect the loss through every expert.
    """
    tokens = ((component, "batch"), (component, "groups" if component == "moe" else "length"))
    if component == "router":
        return (*tokens, ("moe", "mlp"), ("moe", "experts"))
    heads = ("heads", "kv_heads")
    if component == "attention" and axes != ("embed",) and not set(heads) & set(axes):
        return (*tokens, *((component, name) for name in heads))
    return tokens


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name. Only ``*`` is special in a pattern, since names may contain brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _shape_and_dtype(name: str, given: object) -> tuple[tuple[int, ...], str]:
    match given:
        case [[*shape], str(dtype)] if all(isinstance(size, SupportsIndex) and int(size) >= 0 for size in shape):
            return tuple(int(size) for size in shape), dtype
    raise InputError(
        f"weight '{name}' is given as {given!r}. Expected a shape and a dtype, as in ((64, 64), 'float32')."
    )


def _sizes(weights: Sequence[Weight]) -> dict[str, int]:
    """Elements along each logical axis that has the same size in all weights; other axes are left out."""
    found: dict[str, set[int]] = {}
    for weight in weights:
        for axis, size in zip(weight.logical_axes, weight.shape, strict=True):
            found.setdefault(axis, set()).add(size)
    return {axis: next(iter(sizes)) for axis, sizes in found.items() if len(sizes) == 1}


def _check_sizes_known(row: Activation, sizes: Mapping[str, int]) -> None:
    given = {"batch", "length", "q_length", "kv_length", *(("groups", "tokens", "slots") if "experts" in sizes else ())}
    unknown = [axis for axis in row.logical_axes if axis not in given and axis not in sizes]
    if unknown:
        raise InputError(
            f"activation '{row.name}': the weights give '{unknown[0]}' no size, or several. "
            f"Name a dim of a weight '{unknown[0]}', or leave the activation out."
        )

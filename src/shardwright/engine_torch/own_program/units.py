"""The units of a user's own program: the modules that ``fully_shard`` is called on, all chosen before anything is changed.

A unit gathers its weights in one collective, over one set of axes. Where weights inside it are gathered over other axes,
as experts are, the largest modules that have only such weights are units of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shardwright.core.findings.errors import InputError

Axes = tuple[str, ...]
IsUnit = Callable[[str, nn.Module], bool]
"""Whether a module is a unit, from its name in the root module and the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpAxes:
    """The axes that a weight is gathered over, in mesh order, and the ``replicas`` over which its gradient is summed in addition.

    ``replicated_gradient``: those of ``gathered`` whose ranks all make the same gradient.
    """

    gathered: Axes
    replicas: Axes
    replicated_gradient: Axes = ()

    def __str__(self) -> str:
        replicas = f", with replicas over {' and '.join(self.replicas)}" if self.replicas else ""
        return f"{' and '.join(self.gathered)}{replicas}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module for ``fully_shard``, the weights that it gathers, and their axes."""

    name: str
    module: nn.Module
    axes: FsdpAxes
    weights: frozenset[nn.Parameter]


def entries_of_lists(root: nn.Module) -> IsUnit:
    """Whether a module is an entry of an outermost ``nn.ModuleList``: a block in most models."""
    entries = set(_outermost(root))
    return lambda _, module: module in entries


def units_of(root: nn.Module, axes_of: Mapping[nn.Parameter, FsdpAxes], is_unit: IsUnit) -> tuple[Unit, ...]:
    """The units, each after those inside it, the root module last; none where ``axes_of`` is empty.

    ``axes_of``: the axes of each weight that is gathered. Raises InputError for a module whose own weights have different axes,
    and for a weight shared by modules of two units.
    """
    found = list(_units("", root, axes_of, is_unit)) if axes_of else []
    units: dict[nn.Parameter, str] = {}
    for unit in found:
        for weight in unit.weights:
            if weight in units:
                names = " and ".join(repr(name) for name, one in _named(root) if one is weight)
                raise InputError(
                    f"{names} are one weight, and two units would gather it: {_label(units[weight])} and "
                    f"{_label(unit.name)}. Put both in one unit, with `units`."
                )
            units[weight] = unit.name
    return tuple(found)


def _units(name: str, module: nn.Module, axes_of: Mapping[nn.Parameter, FsdpAxes], is_unit: IsUnit) -> Iterator[Unit]:
    axes = _axes(name, module, axes_of, is_unit)
    weights = _own(module, axes_of)
    waiting = list(_children(name, module))
    while waiting:
        path, child = waiting.pop()
        inside = {axes_of[one] for one in child.parameters() if one in axes_of}
        other = {axes_of[one] for one in _own(child, axes_of)} - {axes}
        if inside and _is_called(child) and (is_unit(path, child) or axes not in inside or other):
            yield from _units(path, child, axes_of, is_unit)
        else:
            weights |= _own(child, axes_of)
            waiting += _children(path, child)
    if axes is not None:
        yield Unit(name=name, module=module, axes=axes, weights=frozenset(weights))


def _axes(name: str, module: nn.Module, axes_of: Mapping[nn.Parameter, FsdpAxes], is_unit: IsUnit) -> FsdpAxes | None:
    """The axes of a module's own weights. Without any: those of most elements that are in no requested unit inside it, or else of
    most elements inside it."""
    own = {axes_of[one]: key for key, one in module.named_parameters(recurse=False) if one in axes_of}
    if len(own) > 1:
        (first, one), (second, other), *_ = own.items()
        raise InputError(
            f"{_label(name)} has itself '{one}', which is gathered over {first}, and '{other}', which is gathered over "
            f"{second}: `fully_shard` gathers a module's weights over one set of axes. Give one of them a module of its own."
        )
    elements: Counter[FsdpAxes] = Counter()
    # In the same order on all ranks, which decides between two of equal size.
    for one in dict.fromkeys(_in_no_unit(name, module, is_unit)) or list(module.parameters()):
        if one in axes_of:
            elements[axes_of[one]] += one.numel()
    return next(iter(own), None) or (elements.most_common(1)[0][0] if elements else None)


def _in_no_unit(name: str, module: nn.Module, is_unit: IsUnit) -> Iterator[nn.Parameter]:
    """The weights that are in no requested unit inside the module."""
    yield from module.parameters(recurse=False)
    for path, child in _children(name, module):
        if not (_is_called(child) and is_unit(path, child)):
            yield from _in_no_unit(path, child, is_unit)


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` that is called, at which ``fully_shard`` gathers; a list of modules has not."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _own(module: nn.Module, axes_of: Mapping[nn.Parameter, FsdpAxes]) -> set[nn.Parameter]:
    return {one for one in module.parameters(recurse=False) if one in axes_of}


def _children(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]


def _named(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return root.named_parameters(remove_duplicate=False)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _outermost(child)


def _label(name: str) -> str:
    return f"module '{name}'" if name else "the root module"

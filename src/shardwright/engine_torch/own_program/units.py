"""Which modules of a program that is not ours ``fully_shard`` takes: decided as a whole before anything is changed.

A unit gathers its weights in one collective, over one set of axes. Where weights inside of it are gathered over other axes,
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
"""Whether a module is gathered by itself, from its name in the whole and the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a weight is gathered over, mesh order, and over which replicas its gradient is summed besides.

    ``alike``: those of ``gathered`` whose ranks all make the same gradient.
    """

    gathered: Axes
    replicas: Axes
    alike: Axes = ()

    def __str__(self) -> str:
        return f"{' and '.join(self.gathered)}{f' beside {self.replicas}' if self.replicas else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module for ``fully_shard``, and the weights that it gathers."""

    name: str
    module: nn.Module
    way: Way
    weights: frozenset[nn.Parameter]


def entries_of_lists(root: nn.Module) -> IsUnit:
    """Whether a module is an entry of an ``nn.ModuleList`` that is not itself inside of one: the blocks of most models."""
    entries = set(_outermost(root))
    return lambda _, module: module in entries


def units_of(root: nn.Module, ways: Mapping[nn.Parameter, Way], is_unit: IsUnit) -> tuple[Unit, ...]:
    """The units, each behind those inside of it, the whole module last; none where ``ways`` is empty.

    ``ways``: of each weight that is gathered. Raises InputError for a module whose own weights have two ways, and for a
    weight that two modules share which are not in one unit.
    """
    found = list(_units("", root, ways, is_unit)) if ways else []
    units: dict[nn.Parameter, str] = {}
    for unit in found:
        for weight in unit.weights:
            if weight in units:
                names = " and ".join(repr(name) for name, one in _named(root) if one is weight)
                raise InputError(
                    f"{names} are one weight, and would be gathered apart, by {_said(units[weight])} and "
                    f"{_said(unit.name)}. Leave both in one, with `units`."
                )
            units[weight] = unit.name
    return tuple(found)


def _units(name: str, module: nn.Module, ways: Mapping[nn.Parameter, Way], is_unit: IsUnit) -> Iterator[Unit]:
    way = _way_of(name, module, ways, is_unit)
    weights = _own(module, ways)
    waiting = list(_children(name, module))
    while waiting:
        path, child = waiting.pop()
        inside = {ways[one] for one in child.parameters() if one in ways}
        other = {ways[one] for one in _own(child, ways)} - {way}
        if inside and _is_called(child) and (is_unit(path, child) or way not in inside or other):
            yield from _units(path, child, ways, is_unit)
        else:
            weights |= _own(child, ways)
            waiting += _children(path, child)
    if way is not None:
        yield Unit(name=name, module=module, way=way, weights=frozenset(weights))


def _way_of(name: str, module: nn.Module, ways: Mapping[nn.Parameter, Way], is_unit: IsUnit) -> Way | None:
    """That of a module's own weights, or else what most of the elements have that are left to it, or inside of it."""
    own = {ways[one]: key for key, one in module.named_parameters(recurse=False) if one in ways}
    if len(own) > 1:
        (first, one), (second, other), *_ = own.items()
        raise InputError(
            f"{_said(name)} has itself '{one}', which is gathered over {first}, and '{other}', which is over {second}: "
            f"`fully_shard` gathers a module's weights over one set of axes. Give one of them a module of its own."
        )
    held: Counter[Way] = Counter()
    # In one order on all ranks, which decides between two of one size.
    for one in dict.fromkeys(_left(name, module, is_unit)) or list(module.parameters()):
        if one in ways:
            held[ways[one]] += one.numel()
    return next(iter(own), None) or (held.most_common(1)[0][0] if held else None)


def _left(name: str, module: nn.Module, is_unit: IsUnit) -> Iterator[nn.Parameter]:
    """The weights of no unit inside that was asked for."""
    yield from module.parameters(recurse=False)
    for path, child in _children(name, module):
        if not (_is_called(child) and is_unit(path, child)):
            yield from _left(path, child, is_unit)


def _is_called(module: nn.Module) -> bool:
    """A list of modules is not, and what gathers waits for a call."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _own(module: nn.Module, ways: Mapping[nn.Parameter, Way]) -> set[nn.Parameter]:
    return {one for one in module.parameters(recurse=False) if one in ways}


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


def _said(name: str) -> str:
    return f"module '{name}'" if name else "the whole module"

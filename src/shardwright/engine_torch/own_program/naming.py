"""A module's tensors and values by their names in a checkpoint: those of ``state_dict()``, without the names of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from shardwright.core.findings.errors import InputError
from shardwright.runs.own_program.values import encoded

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile`` and activation checkpointing put into names."""
AVERAGE = "average/"
"""The prefix of a weight's name that names its average in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Tensors and JSON values by name. A tensor with several names, as a tied weight, has its first name only.

    ``tied``: the first name of such a tensor by each of its others. ``keys``: the name of each value in ``state_dict()``. ``ids``: the
    name of each tensor by its identity.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    ids: Mapping[int, str]

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of this very tensor."""
        return self.ids.get(id(tensor))


def named_in(module: nn.Module) -> Named:
    """The weights, buffers and extra state of a module. Raises InputError for what is no module, and for what is neither a tensor nor a
    JSON value in one."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = " and not its state_dict()" if isinstance(module, Mapping) else ""
        raise InputError(
            f"module: needed an nn.Module, found {type(module).__qualname__}: give the module itself{fix}."
        )
    named = _named(module.state_dict(keep_vars=True), "", _copies(module))
    keys = {key: name for name, key in named.keys.items()}
    # A parameter whose state is another tensor, as that of a weight that rests as codes.
    ids = {id(one): keys[key] for key, one in module.named_parameters() if key in keys}
    return replace(named, ids={**ids, **named.ids})


def named_averages(averages: nn.Module | Mapping[str, torch.Tensor] | None) -> Named:
    """Averages of weights: an ``AveragedModel``, another module, or tensors by the names of the weights."""
    if averages is None:
        return _named({}, AVERAGE)
    if not isinstance(averages, nn.Module):
        return _named(averages, AVERAGE)
    of_average = ("module.",) if isinstance(averages, AveragedModel) else ()
    return _named(averages.state_dict(keep_vars=True), AVERAGE, (*_copies(averages), *of_average))


def _copies(module: nn.Module) -> tuple[str, ...]:
    """What the names in a module begin with inside of each ``DistributedDataParallel`` and ``DataParallel``, from the inside out: their
    ``module.`` is no part of a name, so that a module loads what its copies have saved."""
    found = [
        f"{name}.module." if name else "module."
        for name, one in module.named_modules()
        if isinstance(one, DistributedDataParallel | nn.DataParallel)
    ]
    return tuple(sorted(found, key=len, reverse=True))


def plain_name(name: str) -> str:
    """
    >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.q.weight")
    'blocks.0.q.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named(found: Mapping[str, Any], prefix: str, wrappers: Sequence[str] = ()) -> Named:
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    ids: dict[int, str] = {}
    for key, value in found.items():
        name = key
        for wrapper in wrappers:
            if name.startswith(wrapper):
                name = wrapper.removesuffix("module.") + name.removeprefix(wrapper)
        name = prefix + plain_name(name)
        if name in keys:
            raise InputError(f"'{keys[name]}' and '{key}' would both be called '{name}'.")
        keys[name] = key
        if not isinstance(value, torch.Tensor):
            values[name] = encoded(value, f"'{name}'")
        elif id(value) in ids:
            tied[name] = ids[id(value)]
        else:
            ids[id(value)] = name
            tensors[name] = value
    return Named(tensors=tensors, tied=tied, values=values, keys=keys, ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """What a module loads of a ``weight`` where a checkpoint has other tensors of it, as codes in place of high precision.

    ``without``: tensors of the module that follow from others. ``read``: tensors to read besides, which are no part of its state.
    ``unread``: tensors of the checkpoint that are not needed. ``take``: called on every rank when all are read."""

    weight: str
    without: frozenset[str] = frozenset()
    read: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    take: Callable[[], None] | None = None


@runtime_checkable
class LoadsInstead(Protocol):
    def loaded_instead(self, prefix: str, saved: Collection[str]) -> Iterator[Instead]:
        """For tensors of a module whose names begin with ``prefix``. ``saved``: the names in a checkpoint."""
        ...


def instead_of(module: nn.Module, saved: Collection[str]) -> list[Instead]:
    """Of all modules in a module. ``saved``: the names in a checkpoint."""
    found: list[Instead] = []
    for name, one in module.named_modules():
        if isinstance(one, LoadsInstead):
            found += one.loaded_instead(f"{plain_name(name)}." if name else "", saved)
    return found

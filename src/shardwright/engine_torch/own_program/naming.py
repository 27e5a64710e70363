"""A module's tensors and values by their names in a checkpoint: those of ``state_dict()``, without the names of wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    return _named(module.state_dict(keep_vars=True), "", _copies(module))


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

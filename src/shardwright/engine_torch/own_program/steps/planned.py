"""The weights that a module has now, against those of its plan. A program may replace, tie, freeze and move weights at any time: what is
right is followed, and what would train other weights than it seems to is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.engine_torch.io.private import gathered_parameters

_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeight:
    """A weight as ``parallelize`` left it. ``gathered``: by ``fully_shard``. ``in_use``: the mesh and the placements of its DTensor in
    use; None: a plain tensor. ``replicas``: the axes over which its gradient is summed apart from ``fully_shard``."""

    name: str
    shape: tuple[int, ...]
    gathered: bool
    in_use: object
    replicas: tuple[str, ...] = ()


class WeightEntry(NamedTuple):
    """A name under which a module has a parameter."""

    name: str
    owner: nn.Module
    leaf: str
    parameter: nn.Parameter


def entries_of(root: nn.Module) -> Iterator[WeightEntry]:
    """Every name of every parameter. A parametrized weight has the name that it had before."""
    for prefix, owner in root.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            yield WeightEntry(_PARAMETRIZED.sub(r"\1\2", name), owner, leaf, parameter)


def kind_of(parameter: torch.Tensor) -> object:
    """What must not change of a weight in use beside its shape."""
    return (parameter.device_mesh, tuple(parameter.placements)) if isinstance(parameter, DTensor) else None


def current_weights(root: nn.Module, planned: Mapping[str, PlannedWeight]) -> dict[str, WeightEntry]:
    """The parameters that ``fully_shard`` does not gather, each by its first name.

    Raises InputError for a weight that is not in the plan, and for one that was replaced by what its reduction would not fit.
    """
    gathered = gathered_parameters(root)
    names: dict[int, str] = {}
    current: dict[str, WeightEntry] = {}
    # Those of the plan first: a tied weight is known by the name that the plan has.
    for entry in sorted(entries_of(root), key=lambda entry: entry.name not in planned):
        name, parameter = entry.name, entry.parameter
        if (id(entry.owner), entry.leaf) in gathered:
            if not gathered[id(entry.owner), entry.leaf].is_made_of(parameter):
                raise _replaced_gathered(name)
            names[id(parameter)] = name
            continue
        first = names.setdefault(id(parameter), name)
        if first != name:
            _require_tied_alike(planned, first, name)
            continue
        weight = planned.get(name)
        if weight is None:
            if parameter.requires_grad:
                raise InputError(
                    f"the module has a weight '{name}' that was not there at `parallelize`, and no rank would reduce its gradient. "
                    f"{did_you_mean(name, planned)} Add weights before the plan is made, or freeze this one."
                )
            continue
        if weight.gathered:
            raise _replaced_gathered(name)
        _require_alike(weight, parameter)
        current[name] = entry
    return current


def _require_alike(weight: PlannedWeight, parameter: nn.Parameter) -> None:
    name = weight.name
    if kind_of(parameter) != weight.in_use:
        kinds = {True: "a DTensor", False: "a plain tensor"}
        left, now = kinds[weight.in_use is not None], kinds[isinstance(parameter, DTensor)]
        raise InputError(
            f"weight '{name}' is {now if now != left else f'{now} of another mesh or with other placements'}; `parallelize` left "
            f"{left}. Copy values into it instead, with `copy_`, or load a state dict without `assign`."
        )
    if tuple(parameter.shape) != weight.shape:
        raise InputError(f"weight '{name}' has shape {tuple(parameter.shape)} now; it was planned as {weight.shape}.")
    if parameter.requires_grad and not (isinstance(parameter, nn.Parameter) and parameter.is_leaf):
        raise InputError(
            f"weight '{name}' is no parameter in this pass, as under torch.func.functional_call, and its gradient would not be "
            f"reduced. Call the module with its own parameters."
        )


def _require_tied_alike(planned: Mapping[str, PlannedWeight], first: str, other: str) -> None:
    if first not in planned or other not in planned:
        return
    one, two = planned[first], planned[other]
    if one.gathered or two.gathered:
        raise _replaced_gathered(two.name if two.gathered else one.name)
    if (one.replicas, one.in_use) != (two.replicas, two.in_use):
        raise InputError(
            f"'{first}' and '{other}' are one weight now, and their gradients are reduced over other axes "
            f"({' and '.join(one.replicas) or 'none'}; {' and '.join(two.replicas) or 'none'}). Tie them before the plan is made."
        )


def _replaced_gathered(name: str) -> InputError:
    return InputError(
        f"weight '{name}' was replaced since `parallelize`, and `fully_shard` gathers the one from before. Tie, parametrize and "
        f"replace weights before the plan is made; copy values into it with `copy_` or `load_state_dict`."
    )

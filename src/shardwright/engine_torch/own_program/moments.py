"""An optimizer's state by the names of its parameters: tensors of the parameters' shapes, scalars, and the options of groups.

``optimizer.KEY/PARAMETER`` names what any torch optimizer keeps under KEY for a parameter. A tensor is saved as the parameter is
sharded; everything else is a value. So the groups and the order of parameters may change between save and load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import CheckpointError, TensorInfo
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.holding import Optimizers, optimizers_in
from shardwright.engine_torch.own_program.naming import Named
from shardwright.engine_torch.own_program.shards import Shards, shards_of
from shardwright.runs.own_program.values import Reference, Scalar, encoded, with_keys

OPTIMIZER = "optimizer."
OPTIONS = "optimizer.options"
"""What a pattern matches for the options of groups: learning rates and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """An optimizer's state for a save: its tensors, and JSON values."""

    tensors: tuple[Shards, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMoments:
    """State to load: tensors that wait for their elements, and what makes them the optimizer's."""

    tensors: tuple[Shards, ...]
    take: Callable[[], None]


def named(key: str, parameter: str) -> str:
    return f"{OPTIMIZER}{key}/{parameter}"


def moments_of(optimizer: Optimizers, module: Named) -> Moments:
    """The state of an optimizer, or of several. Raises InputError for a parameter that is not the module's and for what is kept
    elsewhere than in their ``state``, CheckpointError for state that is neither a value nor a tensor of the parameter's shape."""
    tensors: list[Shards] = []
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    optimizers = optimizers_in(optimizer)
    for member, group in _groups(optimizers):
        names = [_name(one, module) for one in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if names:
            groups[names[0]] = {
                "names": names,
                "type": type(member).__name__,
                "options": with_keys(
                    {key: encoded(_scalar(value), f"{OPTIONS} '{key}'") for key, value in options.items()}
                ),
            }
        for parameter, name in zip(group["params"], names, strict=True):
            kept = member.state.get(parameter, {})
            if kept:
                found = {key: _saved(named(key, name), value, parameter, tensors) for key, value in kept.items()}
                state[name] = with_keys(found)
    values = {"type": _types(optimizers), "groups": with_keys(groups), "state": with_keys(state)}
    return Moments(tensors=tuple(tensors), values=values)


def new_moments(
    optimizer: Optimizers,
    module: Named,
    values: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    wanted: Callable[[str], bool],
    *,
    partial: bool = False,
) -> NewMoments:
    """The state of a checkpoint for an optimizer, without elements yet. The optimizer is unchanged until ``take``.

    ``values``: what ``moments_of`` returned, decoded. ``wanted``: whether a name is loaded. With ``partial``, a parameter without
    state in the checkpoint keeps what it has. Raises InputError for another kind of
    optimizer, CheckpointError for a parameter that the checkpoint has no state of.
    """
    # A folder of another program that was imported does not say which optimizer it is.
    optimizers = optimizers_in(optimizer)
    if values["type"] is not None and values["type"] != _types(optimizers):
        raise InputError(
            f"the checkpoint has the state of {values['type']}, and this optimizer is {_types(optimizers)}. Load the "
            f"module only, without an optimizer."
        )
    tensors: list[Shards] = []
    states: list[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]] = []
    options: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    # A checkpoint that was saved before several optimizers could be has one type for all.
    known = {name: one.get("type") for one in values["groups"].values() for name in one["names"]}
    for member, group in _groups(optimizers):
        names = [_name(one, module) for one in group["params"]]
        for parameter, name in zip(group["params"], names, strict=True):
            if not _is_wanted(name, values, wanted, partial=partial):
                continue
            if name not in known:
                raise CheckpointError(
                    f"the checkpoint has no optimizer's state of '{name}'. With only=['*'] such a parameter keeps the state that it "
                    f"has, and the others get theirs.",
                    code="SW504",
                )
            if known[name] not in (None, type(member).__name__):
                raise InputError(
                    f"the checkpoint has the state of '{name}' from {known[name]}, and here {type(member).__name__} has it. Give each "
                    f"parameter the optimizer that it had, or load the module only."
                )
            kept = values["state"].get(name, {})
            found = {key: _loaded(value, parameter, group, infos, tensors) for key, value in kept.items()}
            states.append((member, parameter, found))
        if wanted(OPTIONS) and names:
            options.append((group, _options(names, values["groups"], group)))

    def take() -> None:
        for member, parameter, kept in states:
            member.state.pop(parameter, None)
            if kept:
                member.state[parameter] = kept
        for group, found in options:
            group.update(found)

    return NewMoments(tensors=tuple(tensors), take=take)


def names_in(values: Mapping[str, Any]) -> list[str]:
    """Everything of an optimizer's state that a pattern may match."""
    return [named(key, name) for name, kept in values["state"].items() for key in kept] + [OPTIONS]


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    return [(one, group) for one in optimizers for group in one.param_groups]


def _types(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The types of the optimizers: of several of one type, as of one."""
    return ", ".join(sorted({type(one).__name__ for one in optimizers}))


def _is_wanted(name: str, values: Mapping[str, Any], wanted: Callable[[str], bool], *, partial: bool) -> bool:
    keys = [named(key, name) for key in values["state"].get(name, {})]
    found = [wanted(key) for key in keys]
    if any(found) and not all(found):
        raise InputError(
            f"only: it takes a part of the optimizer's state of '{name}': {', '.join(keys)}. Take all of it or none."
        )
    return all(found) if keys else not partial


def _name(parameter: torch.Tensor, module: Named) -> str:
    name = module.name_of(parameter)
    if name is None:
        raise InputError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the module's state_dict(). Give the "
            f"module that has all its parameters, and make the optimizer after the module is sharded."
        )
    return name


def _saved(name: str, value: Any, parameter: torch.Tensor, tensors: list[Shards]) -> Any:
    """The JSON value of one entry of a parameter's state; a tensor is appended to ``tensors``."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return encoded(_scalar(value), f"'{name}'")
    like = parameter if isinstance(parameter, DTensor) and not isinstance(value, DTensor) else None
    if like is not None and value.shape != like.to_local().shape:
        raise CheckpointError(
            f"'{name}' has shape {tuple(value.shape)}, and this rank's shard of its parameter has {tuple(like.to_local().shape)}: "
            f"how it is sharded cannot be known. Keep it as a DTensor.",
            code="SW504",
        )
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        raise CheckpointError(
            f"'{name}' is a DTensor of shape {tuple(value.shape)}, and its parameter has {tuple(parameter.shape)}: it cannot be "
            f"made again when it is loaded.",
            code="SW504",
        )
    tensors.append(shards_of(name, value, like))
    return encoded(Reference(name, local=like is not None), name)


def _loaded(
    value: Any,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    tensors: list[Shards],
) -> Any:
    """An entry of a parameter's state; a tensor's elements are read later, through ``tensors``."""
    if isinstance(value, Scalar):
        # As torch's own load_state_dict: a step is on the host unless the update runs on the device.
        device = parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return torch.tensor(value.value, dtype=torch_dtype(value.dtype), device=device)
    if not isinstance(value, Reference):
        return value
    info = infos.get(value.tensor)
    if info is None:
        raise CheckpointError(f"'{value.tensor}' is missing in the checkpoint.", code="SW504")
    dtype, detached = torch_dtype(info.dtype), parameter.detach()
    like = detached if isinstance(detached, DTensor) and value.local else None
    if info.shape == tuple(parameter.shape):
        source = like.to_local() if like is not None else detached
        tensor = torch.zeros_like(source, dtype=dtype)
    elif isinstance(detached, DTensor):
        raise CheckpointError(
            f"'{value.tensor}': shape: found {info.shape}, needed {tuple(parameter.shape)}, that of its parameter.",
            code="SW504",
        )
    else:
        tensor = torch.zeros(info.shape, dtype=dtype, device=parameter.device)
    tensors.append(shards_of(value.tensor, tensor, like))
    return tensor


def _options(names: list[str], groups: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that were saved for some parameters, which must have been the same for all of them."""
    saved = {name: one["options"] for one in groups.values() for name in one["names"]}
    found = [saved[name] for name in names if name in saved]
    for name, one in zip(names, found, strict=False):
        if one != found[0]:
            key = next(key for key in {**found[0], **one} if found[0].get(key) != one.get(key))
            raise CheckpointError(
                f"the optimizer has '{names[0]}' and '{name}' in one group, and in the checkpoint their '{key}' differs: "
                f"{found[0].get(key)!r} and {one.get(key)!r}. Give them the groups that they had, or load without {OPTIONS}.",
                code="SW504",
            )
    values = found[0] if found else {}
    return {key: _tensor_of(value, group.get(key)) for key, value in values.items()}


def _tensor_of(value: Any, before: Any) -> Any:
    if not isinstance(value, Scalar):
        return value
    device = before.device if isinstance(before, torch.Tensor) else torch.device("cpu")
    return torch.tensor(value.value, dtype=torch_dtype(value.dtype), device=device)


def _scalar(value: Any) -> Any:
    """A tensor without dims as a value; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    # The same on all ranks: values of all ranks are compared.
    local = value.to_local() if isinstance(value, DTensor) else value
    return Scalar(local.item(), str(value.dtype).removeprefix("torch."))

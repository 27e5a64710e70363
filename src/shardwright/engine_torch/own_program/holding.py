"""What an optimizer holds: the optimizers whose ``state`` a checkpoint has, and tensors elsewhere, which no checkpoint would have.

| optimizer | what is saved of it |
|---|---|
| one that keeps all in its ``state``, by its parameters | that |
| a list, or an object whose ``optimizers`` are a list or a mapping | what each of them keeps |
| one that keeps tensors, or another optimizer's state, anywhere else | nothing: it is refused by name |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.findings.errors import InputError

Optimizers = Optimizer | Sequence[Optimizer]
"""An optimizer, a container of optimizers, or a list of them."""

ZERO = "ZeroRedundancyOptimizer"
"""Its module loads PyTorch's remote procedure calls, so it is known by its name."""

NOT_STATE = frozenset(("state", "param_groups", "defaults"))
"""Attributes that are saved, and the arguments of the optimizer, which its groups have."""

MOST_DEPTH = 6
"""How many attributes and entries lie between an optimizer and what is looked for in it."""


def optimizers_in(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """The optimizers whose ``state`` is all that is kept: this one, or those of a list or a container.

    Raises InputError, with the name, for what keeps anything that is in no such ``state``, for a parameter that two of them have, and
    for what is no optimizer.
    """
    members = _members(optimizer)
    if members is None:
        single = cast(Optimizer, optimizer)
        _require_all_in_state(single)
        return (single,)
    found = tuple(each for one in members for each in optimizers_in(one))
    owners: dict[int, Optimizer] = {}
    for one in found:
        for parameter in _parameters(one):
            if owners.setdefault(id(parameter), one) is not one:
                raise InputError(
                    f"two optimizers of {_kind(optimizer)} have one parameter of shape {tuple(parameter.shape)}: a checkpoint has one "
                    f"state of each. Give each parameter to one of them."
                )
    if not isinstance(optimizer, Sequence):
        lost = [one for one in _parameters(optimizer) if id(one) not in owners]
        if lost:
            raise InputError(
                f"{_kind(optimizer)} holds optimizers, and a parameter of shape {tuple(lost[0].shape)} that none of them has. Give it to "
                f"one of them."
            )
        _require_none_elsewhere(optimizer, found)
    return found


def _members(optimizer: Any) -> Sequence[Any] | None:
    """The optimizers of a list or of a container; None for one that is not several."""
    several = optimizer if isinstance(optimizer, list | tuple) else getattr(optimizer, "optimizers", None)
    if isinstance(several, Mapping):
        several = list(several.values())
    if isinstance(several, list | tuple):
        return cast(Sequence[Any], several)
    if not (hasattr(optimizer, "param_groups") and isinstance(getattr(optimizer, "state", None), Mapping)):
        raise InputError(
            f"optimizer: needed a torch.optim.Optimizer, or a list of them, found {type(optimizer).__qualname__}."
        )
    return None


def _require_all_in_state(optimizer: Optimizer) -> None:
    kind = _kind(optimizer)
    if any(each.__name__ == ZERO for each in type(optimizer).__mro__):
        raise InputError(
            f"{ZERO} keeps on each rank the state of other parameters, in its 'optim': nothing of that would be saved. Shard weights and "
            f"state instead, by `fully_shard` or by a layout that has an axis with the role `fsdp`, as `parallelize` does: then each "
            f"rank of a plain torch optimizer keeps its own shards only, and they are saved."
        )
    for path, inner in _inside(optimizer, lambda value: isinstance(value, Optimizer)):
        if inner.state is not optimizer.state:
            raise InputError(
                f"{kind} holds the optimizer {_kind(inner)}, as '{path}', whose state is not its own: nothing of that would be saved. "
                f"Give that optimizer; of several, a list."
            )
    known = {id(one) for one in _parameters(optimizer)}
    for key, kept in optimizer.state.items():
        if not isinstance(key, torch.Tensor) or id(key) not in known:
            label = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise InputError(
                f"{kind} has state of {label}, which is no parameter of its groups: it would not be saved. Keep it as state of a "
                f"parameter or as an option of a group, or remove it from the optimizer's `state`."
            )
        if not isinstance(kept, Mapping):
            raise InputError(
                f"{kind} keeps a {type(kept).__name__} for a parameter, and a checkpoint has mappings of tensors and values. Save with "
                f"another optimizer, or the module only."
            )
    _require_none_elsewhere(optimizer, (optimizer,))
    # Of torch's own method the result is known.
    if getattr(type(optimizer), "state_dict", None) is not Optimizer.state_dict:
        try:
            extra = [str(key) for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        # Another's code runs here.
        except Exception as error:
            raise InputError(
                f"{kind}.state_dict() fails, so that what it keeps besides its state cannot be known: {type(error).__name__}: {error}"
            ) from error
        if extra:
            raise InputError(
                f"{kind} has {', '.join(map(repr, extra))} in its state_dict(), besides its state and its groups: it would not be saved. "
                f"Give the optimizer inside, and the rest as `values`."
            )


def _require_none_elsewhere(optimizer: Any, saved: Sequence[Optimizer]) -> None:
    """Raises InputError for a tensor in an attribute that is neither a parameter, a gradient nor what ``saved`` keep; a single element, as
    the flag of a kernel, may be."""
    reached: set[object] = set()
    for one in (optimizer, *saved):
        for parameter in _parameters(one):
            reached.update(_memory(each) for each in (parameter, parameter.grad) if each is not None)
        if one in saved:
            reached.update(_memory(each) for _, each in _walk("", dict(one.state), _is_tensor, set(), 0))
    ours = {id(one) for one in saved}
    for path, tensor in _inside(optimizer, _is_tensor, skipped=ours):
        if tensor.numel() > 1 and _memory(tensor) not in reached:
            raise InputError(
                f"{_kind(optimizer)} keeps a tensor of shape {tuple(tensor.shape)} as '{path}', and not in its `state`: it would not be "
                f"saved. Keep it in `state` by its parameter."
            )


def _inside(
    optimizer: Any, wanted: Callable[[Any], bool], skipped: Set[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """What an optimizer's attributes hold, at any depth, by its path; hooks and modules are the program's."""
    attributes = {key: one for key, one in _attributes(optimizer).items() if key not in NOT_STATE and "hook" not in key}
    yield from _walk("", attributes, wanted, {id(optimizer), *skipped}, 0)


def _walk(
    path: str, value: Any, wanted: Callable[[Any], bool], seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth > MOST_DEPTH:
        return
    seen.add(id(value))
    if wanted(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            name = str(key) if not isinstance(key, torch.Tensor) else f"[{tuple(key.shape)}]"
            yield from _walk(f"{path}.{name}" if path else name, one, wanted, seen, depth + 1)
    elif isinstance(value, list | tuple | Set):
        for number, one in enumerate(value):
            yield from _walk(f"{path}[{number}]", one, wanted, seen, depth + 1)
    elif not isinstance(value, type | nn.Module | torch.Tensor) and not callable(value):
        for key, one in _attributes(value).items():
            yield from _walk(f"{path}.{key}", one, wanted, seen, depth + 1)


def _attributes(value: Any) -> Mapping[str, Any]:
    slots = {
        name: getattr(value, name) for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _memory(tensor: torch.Tensor) -> object:
    """Where a tensor's elements are: of a view, those of what it is a view of."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        return local.device, local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # A sparse tensor, or one that consists of others.
        return id(tensor)


def _kind(optimizer: Any) -> str:
    return type(optimizer).__name__

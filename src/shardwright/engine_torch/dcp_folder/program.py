"""The entries of PyTorch's ``get_state_dict`` as those that ``engine_torch.load`` reads.

| entry of the state dict | in the checkpoint |
|---|---|
| MODULE, ``0.weight`` | tensor ``0.weight``; extra state is a value of this name |
| OPTIMIZER, ``state``, ``0.weight``, ``exp_avg`` | tensor ``optimizer.exp_avg/0.weight``; without dims it is a value |
| OPTIMIZER, ``param_groups``, 0, ``lr`` | an option of the group of the weights in ``params`` |
| OPTIMIZER, ``param_groups.0.weight.lr`` | an option of this weight, where the optimizer's state was flattened |
| any other | a value that ``load`` returns |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import names_of
from shardwright.engine_torch.own_program.moments import named
from shardwright.runs.own_program.entries import StatePath, nested
from shardwright.runs.own_program.values import Reference, Scalar, encoded, with_keys

NO_PREFIX = "."
"""The prefix of a module whose names have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """``tensors``: the name in the checkpoint of each tensor by its name in the folder. ``values``: as JSON."""

    tensors: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was found so far. ``groups``: options by the number of a group, or by the weight of one."""

    tensors: dict[str, str] = field(default_factory=dict)
    module: dict[StatePath, Any] = field(default_factory=dict)
    own: dict[StatePath, Any] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[int | str, dict[str, Any]] = field(default_factory=dict)


def program_of(
    paths: Mapping[str, StatePath],
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    scalar: Callable[[str], Scalar],
    *,
    module: str,
    optimizer: str | None,
) -> Program:
    """Arrange the entries of a state dict. ``shapes``: of the tensors; ``values``: all other entries; by DCP's names.

    ``module``, ``optimizer``: the keys of the state dict that they are under. ``scalar``: reads a tensor without dims.
    Raises InputError for keys with nothing under them, and for entries that ``engine_torch.load`` has no place for.
    """
    if not any(_under(paths[name], module) for name in shapes):
        raise InputError(f"--module {module}: there is no tensor under this key. There are {names_of(_keys(paths))}.")
    found = _Found()
    for name, path in paths.items():
        inside = None if optimizer is None else _under(path, optimizer)
        if inside is not None:
            _optimizer_entry(found, name, inside, shapes, values, scalar)
            continue
        inside = _under(path, module)
        if inside is not None and _is_module_entry(inside, is_value=name in values, is_all=module == NO_PREFIX):
            if name in values:
                found.module[inside] = values[name]
            else:
                found.tensors[name] = str(inside[0])
        elif name in values:
            found.own[path] = values[name]
        elif not shapes[name]:
            found.own[path] = scalar(name).value
        else:
            raise InputError(
                f"'{name}' is a tensor outside of the module ({module}) and its optimizer ({optimizer}), for which "
                f"engine_torch.load has no place. Leave it out with --leave-out, or import without --module."
            )
    result: dict[str, Any] = {
        "module": with_keys({str(key): encoded(value, f"'{key}'") for key, value in nested(found.module).items()}),
        "own": encoded(nested(found.own), "values"),
    }
    if optimizer is not None:
        result["optimizer"] = _optimizer(found, optimizer, paths)
    return Program(tensors=found.tensors, values=result)


def _is_module_entry(inside: StatePath, *, is_value: bool, is_all: bool) -> bool:
    """Whether an entry is of the module. Without a prefix, everything else of a program is beside it."""
    if is_value:
        return not is_all or str(inside[0]).endswith("_extra_state")
    return len(inside) == 1


def _under(path: StatePath, prefix: str) -> StatePath | None:
    """The rest of a path that begins with a prefix, or None. The names of a state dict that was never nested have one key.

    >>> _under(("app", "model", "0.weight"), "app.model"), _under(("model.0.weight",), "model"), _under(("b",), ".")
    (('0.weight',), ('0.weight',), ('b',))
    """
    if prefix == NO_PREFIX:
        return path
    for length in range(1, len(path)):
        if ".".join(map(str, path[:length])) == prefix:
            return path[length:]
    if len(path) == 1 and str(path[0]).startswith(f"{prefix}."):
        return (str(path[0])[len(prefix) + 1 :],)
    return None


def _optimizer_entry(
    found: _Found,
    name: str,
    inside: StatePath,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    scalar: Callable[[str], Scalar],
) -> None:
    place = _place(inside)
    if place is None:
        raise InputError(
            f"'{name}' is no entry of an optimizer's state as get_state_dict makes it: state, weight, key, or param_groups, "
            f"number, option. Leave it out with --leave-out."
        )
    of, key = place
    if inside[0] == "param_groups" or str(inside[0]).startswith("param_groups."):
        found.groups.setdefault(of, {})[key] = values[name] if name in values else scalar(name)
        return
    kept = found.state.setdefault(str(of), {})
    if name in values:
        kept[key] = values[name]
    elif not shapes[name]:
        kept[key] = scalar(name)
    else:
        found.tensors[name] = named(key, str(of))
        kept[key] = Reference(named(key, str(of)))


def _place(inside: StatePath) -> tuple[int | str, str] | None:
    """The weight or the number of the group of an entry, and its key."""
    if len(inside) == 3 and inside[0] in ("state", "param_groups"):
        return inside[1], str(inside[2])
    if len(inside) == 1:
        # Flattened by PyTorch, or never nested. The key has no dot.
        head, _, rest = str(inside[0]).partition(".")
        of, dot, key = rest.rpartition(".")
        if head in ("state", "param_groups") and dot:
            return (int(of) if head == "param_groups" and of.isdecimal() and len(of) < 9 else of), key
    return None


def _optimizer(found: _Found, key: str, paths: Mapping[str, StatePath]) -> Any:
    if not found.groups:
        raise InputError(
            f"--optimizer {key}: there are no param_groups under this key. There are {names_of(_keys(paths))}."
        )
    groups: dict[str, Any] = {}
    for of, options in found.groups.items():
        names = [of] if isinstance(of, str) else options.get("params")
        if type(names) is not list or not all(type(name) is str for name in names):
            raise InputError(
                f"the optimizer's state is by numbers and not by names ('{key}.param_groups.{of}.params'), so whose it is is "
                f"known to no file. Save what get_state_dict returns, or leave it out with --leave-out '{key}.*'."
            )
        kept = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        if names:
            groups[names[0]] = {
                "names": names,
                "options": with_keys(
                    {name: encoded(value, f"'{key}', the option '{name}'") for name, value in kept.items()}
                ),
            }
    state = {
        weight: with_keys({name: encoded(value, f"'{key}', '{name}' of '{weight}'") for name, value in kept.items()})
        for weight, kept in found.state.items()
    }
    # DCP does not say which optimizer it is.
    return {"type": None, "groups": with_keys(groups), "state": with_keys(state)}


def _keys(paths: Mapping[str, StatePath]) -> list[str]:
    return list(dict.fromkeys(str(path[0]) for path in paths.values()))

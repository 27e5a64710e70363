"""Values that are not tensors, as JSON: exactly what they were when they are read, or refused by their place.

JSON has no tuples, no numbers that are not finite, no keys but texts and no dtypes. Those are mappings with one key that
begins with ``$``; a key of the user's that begins so gets a second one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwright.checkpoint import CheckpointError
from shardwright.runs.own_program.members import Members


class Scalar(NamedTuple):
    """The one element of an array without dims, and its dtype by name."""

    value: bool | int | float
    dtype: str


class Reference(NamedTuple):
    """A tensor of the checkpoint, by its name, in the place of a value. ``local``: its holders keep plain local shards."""

    tensor: str
    local: bool = False


def encoded(value: Any, place: str) -> Any:
    """A value as JSON.

    Raises CheckpointError, with the place, for what is not None, a bool, a number, a text, or a list, tuple or mapping of these.

    >>> encoded({"betas": (0.9, 0.95), 3: float("inf")}, "x")
    {'$mapping': [['betas', {'$tuple': [0.9, 0.95]}], [3, {'$float': 'inf'}]]}
    >>> decoded(encoded({"$tuple": 1}, "x"))
    {'$tuple': 1}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Scalar):
        return {"$scalar": [encoded(value.value, place), value.dtype]}
    if isinstance(value, Reference):
        return {"$tensor": value.tensor, **({"local": True} if value.local else {})}
    if kind is list:
        return [encoded(each, f"{place}[{number}]") for number, each in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encoded(each, f"{place}[{number}]") for number, each in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {
                f"${key}" if key.startswith("$") else key: encoded(each, f"{place}['{key}']")
                for key, each in value.items()
            }
        return {
            "$mapping": [
                [encoded(key, f"a key of {place}"), encoded(each, f"{place}[{key!r}]")] for key, each in value.items()
            ]
        }
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, and values that JSON has; it never "
        f"pickles. Save what it consists of, or leave it out.",
        code="SW504",
    )


def decoded(value: Any) -> Any:
    """The value that was encoded. Raises CheckpointError for JSON that ``encoded`` does not write."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$") and not key.startswith("$$")]
    if not marks:
        return {key.removeprefix("$"): decoded(each) for key, each in value.items()}
    try:
        match marks[0], value[marks[0]]:
            case "$float", str(text):
                return float(text)
            case "$scalar", [number, str(dtype)]:
                return Scalar(decoded(number), dtype)
            case "$tensor", str(name):
                return Reference(name, local=value.get("local") is True)
            case "$tuple", list(items):
                return tuple(decoded(each) for each in items)
            case "$mapping", list(items):
                return {decoded(key): decoded(each) for key, each in items}
    except (TypeError, ValueError):
        pass
    raise CheckpointError(f"a value of the checkpoint is not one that was saved: {value!r:.200}", code="SW504")


def merged(values: Mapping[str, Any], members: Members) -> Mapping[str, Any]:
    """The values of all processes, which may each have other keys. Raises CheckpointError where equal keys have other values."""
    different = members.distinct(values)
    found: dict[str, Any] = dict(different[0].value)
    origins = _origins(found, different[0].process, "")
    for other in different[1:]:
        found = _joined(found, other.value, "", other.process, origins, members)
    return found


def _joined(
    found: Mapping[str, Any],
    other: Mapping[str, Any],
    place: str,
    process: int,
    origins: dict[str, int],
    members: Members,
) -> dict[str, Any]:
    joined = dict(found)
    for key, value in other.items():
        inside = f"{place}['{key}']" if place else key
        if key not in joined:
            joined[key] = value
            origins.update(_origins(value, process, inside))
        elif _is_mapping(value) and _is_mapping(joined[key]):
            joined[key] = _joined(joined[key], value, inside, process, origins, members)
        elif joined[key] != value:
            raise CheckpointError(
                f"{inside} is {joined[key]!r:.80} on {members.named([origins.get(inside, 0)])} and {value!r:.80} on "
                f"{members.named([process])}: a checkpoint has one value for all. Give all the same, or a key for each.",
                code="SW502",
            )
    return joined


def _is_mapping(value: Any) -> bool:
    """Whether a JSON value is a mapping of the user's, and no tuple, number or tensor."""
    return isinstance(value, dict) and all(key.startswith("$$") or not key.startswith("$") for key in value)


def _origins(value: Any, process: int, place: str) -> dict[str, int]:
    """The process that a value is from, for every place in it."""
    found = {place: process}
    if isinstance(value, dict):
        for key, each in value.items():
            found |= _origins(each, process, f"{place}['{key}']" if place else key)
    return found

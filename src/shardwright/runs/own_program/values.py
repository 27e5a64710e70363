"""Values that are not tensors, as JSON: exactly what they were when they are read, or refused by their place.

JSON has no tuples, no numbers that are not finite, no keys but texts and no dtypes. Those are mappings with one key that
begins with ``$``; a key of the user's that begins so gets a second one. A number of NumPy, as a learning rate that was
computed with it, keeps its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.checkpoint import CheckpointError
from shardwright.core.findings.errors import InputError
from shardwright.runs.own_program.members import Members

MOST_INTEGER = 10**4300
"""Python converts no text of more digits to an integer."""


NUMBERS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""The dtypes of NumPy's numbers that are values."""


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
    if kind is int and abs(value) >= MOST_INTEGER:
        raise CheckpointError(
            f"{place} is an integer of more than 4,300 digits, which no reader of JSON takes. Save it as a text, or leave it out.",
            code="SW504",
        )
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
            return with_keys({key: encoded(each, f"{place}['{key}']") for key, each in value.items()})
        return {
            "$mapping": [
                [encoded(key, f"a key of {place}"), encoded(each, f"{place}[{key!r}]")] for key, each in value.items()
            ]
        }
    if isinstance(value, np.generic) and value.dtype.name in NUMBERS:
        return {"$numpy": [encoded(value.item(), place), value.dtype.name]}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        raise CheckpointError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, and a value has no arrays inside. Give its numbers, as tolist() "
            f"makes them, or save it as a tensor.",
            code="SW504",
        )
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, and values that JSON has; it never "
        f"pickles. Save what it consists of, or leave it out.",
        code="SW504",
    )


def with_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of the user's keys to values that are JSON already, as JSON.

    >>> decoded(with_keys({"$tuple": encoded((1, 2), "x")}))
    {'$tuple': (1, 2)}
    """
    return {f"${key}" if key.startswith("$") else key: each for key, each in values.items()}


def without_marks(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``with_keys``, whose values stay JSON."""
    return {key.removeprefix("$") if key.startswith("$$") else key: each for key, each in values.items()}


def differ(one: Any, other: Any) -> bool:
    """Whether two JSON values are different. For Python 1, 1.0 and True are equal.

    >>> differ({"a": 1, "b": 2}, {"b": 2, "a": 1}), differ([1], [True])
    (False, True)
    """
    first, second = (json.dumps(value, sort_keys=True) for value in (one, other))
    return first != second


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
            case "$numpy", [number, str(dtype)] if dtype in NUMBERS:
                return np.dtype(dtype).type(decoded(number))
            case "$tensor", str(name):
                return Reference(name, local=value.get("local") is True)
            case "$tuple", list(items):
                return tuple(decoded(each) for each in items)
            case "$mapping", list(items):
                return {decoded(key): decoded(each) for key, each in items}
    except (TypeError, ValueError):
        pass
    raise CheckpointError(f"a value of the checkpoint is not one that was saved: {value!r:.200}", code="SW504")


def mapping(values: Any) -> dict[Any, Any]:
    """The values that a save was given. Raises InputError for what is no mapping."""
    if values is not None and not isinstance(values, Mapping):
        raise InputError(f"values: found {values!r:.80}, needed a mapping of names to values.")
    return dict(values or {})


def as_python(value: Any) -> Any:
    """A decoded value with numbers of Python in place of NumPy's, as other programs keep them.

    >>> as_python({"lr": [np.float32(0.5)], "betas": (0.9, np.int64(1))})
    {'lr': [0.5], 'betas': (0.9, 1)}
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is list:
        return [as_python(each) for each in value]
    if type(value) is tuple:
        return tuple(as_python(each) for each in value)
    if type(value) is dict:
        return {as_python(key): as_python(each) for key, each in value.items()}
    return value


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
        elif differ(joined[key], value):
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

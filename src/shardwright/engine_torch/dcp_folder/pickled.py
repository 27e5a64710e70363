"""The pickled ``.metadata`` of ``torch.distributed.checkpoint``, read as data: no class is imported and no function is called.

A pickle is a program for a small machine, which may call anything. Here only the instructions run that build values. A class is
its name, an object is a ``Record`` of its class's name, and any class that DCP's metadata does not have is refused.

``pickle.Unpickler`` with a ``find_class`` of its own would call nothing either, but is not safe for a forged file: ten bytes with the
memo index 400,000,000 take 6 GB, and a mapping whose key is a million nested tuples ends the process with a segmentation fault.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoint import CheckpointError
from shardwright.core.findings.escaped import escaped

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

CLASSES: frozenset[tuple[str, str]] = frozenset(
    (
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        # The path of the folder when it was saved. Python 3.13 has another module for it.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    )
)
"""Every class and function in the metadata that PyTorch 2.0 to 2.14 write, besides dtypes."""

PUSHES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES"),
    )
)
"""Instructions that push their argument."""
GETS, PUTS = frozenset(("BINGET", "LONG_BINGET", "GET")), frozenset(("BINPUT", "LONG_BINPUT", "PUT"))
CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES: Mapping[str, int] = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class UnknownNameError(Exception):
    """A pickle names a class or a function that is not in DCP's metadata."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class, a function or a dtype of the pickle, by its name."""

    module: str
    name: str


class Record:
    """An object of the pickle: its class, what it was made of, and its state."""

    __slots__ = ("arguments", "cls", "state")

    def __init__(self, cls: Name, arguments: tuple[Any, ...]) -> None:
        self.cls, self.arguments = cls, arguments
        self.state: Any = None


def unpickled(data: bytes) -> Any:
    """The value of a pickle, of None, bools, numbers, texts, bytes, lists, tuples, mappings, Names and Records.

    Keys of mappings are texts, integers or Records. Time and memory are proportional to the size of the pickle.
    Raises UnknownNameError, and CheckpointError for what is no pickle of values.
    """
    try:
        return _unpickled(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, MemoryError) as error:
        raise CheckpointError(f"it is damaged, or no pickle of values: {type(error).__name__}: {error}") from error


def _unpickled(data: bytes) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def after_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, below.pop()
        return items

    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name in PUSHES:
            stack.append(argument)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in GETS:
            stack.append(memo[_number(argument)])
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in TUPLES:
            stack[-TUPLES[name] :] = [tuple(stack[-TUPLES[name] :])]
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name == "BUILD":
            state = stack.pop()
            _record(stack[-1]).state = state
        elif name in ("NEWOBJ", "REDUCE"):
            arguments = stack.pop()
            stack.append(_made(stack.pop(), arguments))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("SETITEMS", "SETITEM"):
            items = after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            for key, value in zip(items[::2], items[1::2], strict=True):
                _mapping(stack[-1])[_key(key)] = value
        elif name in ("APPENDS", "APPEND"):
            items = after_mark() if name == "APPENDS" else [stack.pop()]
            _list(stack[-1]).extend(items)
        elif name == "TUPLE":
            items = after_mark()
            stack.append(tuple(items))
        elif name in ("STACK_GLOBAL", "GLOBAL"):
            # The argument of GLOBAL is the module and the name with a space between them.
            both = [stack.pop(-2), stack.pop()] if name == "STACK_GLOBAL" else str(argument).split(" ", 1)
            stack.append(_named(*both))
        elif name in PUTS:
            memo[_number(argument)] = stack[-1]
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the instruction {name} builds no value of DCP's")
    raise ValueError("it has no end")


def _named(module: Any, name: Any) -> Name:
    if type(module) is not str or type(name) is not str:
        raise TypeError("a name is no text")
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if not is_dtype and (module, name) not in CLASSES:
        raise UnknownNameError(escaped(f"{module}.{name}"))
    return Name(module, name)


def _made(what: Any, arguments: Any) -> Any:
    if not isinstance(what, Name) or type(arguments) is not tuple:
        raise TypeError("what is called is no class")
    if what == Name("torch", "Size"):
        return tuple(arguments[0]) if arguments else ()
    return Record(what, arguments)


def _record(value: Any) -> Record:
    if not isinstance(value, Record):
        raise TypeError(f"a {type(value).__name__} has no state")
    return value


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} has no keys")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"a {type(value).__name__} is no list")
    return value


def _key(value: Any) -> Any:
    # The hash of a tuple is that of all tuples inside it, of which a pickle can nest a million.
    if type(value) not in (str, int) and not isinstance(value, Record):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def _number(argument: Any) -> int:
    if type(argument) is not int:
        raise TypeError("a place in memory is no number")
    return argument

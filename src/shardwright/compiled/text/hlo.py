"""Parses the text of a compiled program into computations and instructions.

Inside a computation, a line that is not an instruction belongs to the instruction above it: kernels print attributes
over several lines, one of which begins with two braces. A computation ends with a line that is one brace, optionally
followed by the name of the unit that runs it. Attributes of instructions are parsed on access: they are most of a text,
and few of them are needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shardwright.compiled.text.shapes import Array, arrays_of
from shardwright.core.findings.errors import InputError

_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLEE = re.compile(r"[ {](?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLEES = re.compile(r"[ {](?:called_computations|branch_computations)=\{([^}]*)\}")
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True)
class Instruction:
    """``%name = type op(rest``: ``rest`` has the operands, a closing parenthesis and the attributes."""

    name: str
    type: str
    op: str
    rest: str
    is_root: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, without tokens."""
        return arrays_of(self.type)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        return tuple(_OPERAND.findall(self.rest, 0, _closing(self.rest)))

    @property
    def op_name(self) -> str | None:
        """Its name in the source program; None if the compiler kept none."""
        found = _OP_NAME.search(self.rest) if 'op_name="' in self.rest else None
        return found[1] if found and found[1] else None

    @property
    def callees(self) -> tuple[str, ...]:
        """The computations that it names, including reducers."""
        found = _CALLEE.findall(self.rest)
        for several in _CALLEES.findall(self.rest):
            found += _OPERAND.findall(several) or [name.strip() for name in several.split(",") if name.strip()]
        return tuple(found)

    def callee(self, role: str) -> str | None:
        """The computation of its attribute ``body``, ``condition``, ``calls`` or ``to_apply``."""
        found = re.search(rf"[ {{]{role}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def parameter(self) -> int | None:
        """Its parameter number; None if it is not a parameter."""
        return int(self.rest.split(")")[0]) if self.op == "parameter" else None

    def number(self, attribute: str) -> int | None:
        """An integer attribute, such as ``index``."""
        found = re.search(rf"{attribute}=(\d+)", self.rest)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """Instructions in text order, which in a scheduled program is the order in which they start."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: Mapping[str, Instruction] = field(init=False, repr=False)
    root: Instruction = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.instructions, self.name
        object.__setattr__(self, "by_name", {instruction.name: instruction for instruction in self.instructions})
        root = next((one for one in reversed(self.instructions) if one.is_root), self.instructions[-1])
        object.__setattr__(self, "root", root)


@lru_cache(maxsize=16)
def places_of(computation: Computation) -> Mapping[str, int]:
    """The position of each instruction in a computation."""
    return {instruction.name: place for place, instruction in enumerate(computation.instructions)}


@lru_cache(maxsize=16)
def users_of(computation: Computation) -> Mapping[str, Sequence[Instruction]]:
    """The instructions that use each value, by the name of the value."""
    found: dict[str, list[Instruction]] = {}
    for instruction in computation.instructions:
        for name in dict.fromkeys(instruction.operands):
            found.setdefault(name, []).append(instruction)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """``tables``: the lines of the tables of source locations, by table name. ``num_partitions``: the number of devices
    of the program, of one slice if there are several; None if the text does not give it."""

    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int | None
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Parse a program's text. Raises InputError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry = name = table = None
    found: list[Instruction] = []
    match = _INSTRUCTION.match
    for line in _lines(text):
        if name is None:
            if line.endswith("{") and (head := _HEAD.match(line)):
                name, found, table = head["name"], [], None
                entry = name if head["entry"] else entry
            elif line in TABLES:
                table = tables.setdefault(line, [])
            elif table is not None and line:
                table.append(line)
        elif one := match(line):
            root, called, kind, op = one.groups()
            found.append(Instruction(called, kind, op, line[one.end() :], root is not None))
        elif _ends(line) and found and not _is_open(found[-1]):
            computations[name] = Computation(name, tuple(found))
            name = None
        elif found:
            last = found[-1]
            found[-1] = Instruction(last.name, last.type, last.op, f"{last.rest}\n{line}", last.is_root)
    if entry is None or entry not in computations:
        raise InputError(
            "This is not the text of a compiled program: it has no computation that begins with 'ENTRY' and ends with "
            "a line '}'."
        )
    partitions = _NUM_PARTITIONS.search(text, 0, max(text.find("\n"), 0))
    return Program(
        computations=computations,
        entry=entry,
        num_partitions=int(partitions[1]) if partitions else None,
        tables={title: tuple(lines) for title, lines in tables.items()},
    )


def _lines(text: str) -> Iterator[str]:
    """The lines one after another, without a list of all of them."""
    start = 0
    while (stop := text.find("\n", start)) != -1:
        yield text[start:stop]
        start = stop + 1
    yield text[start:]


def _ends(line: str) -> bool:
    return line == "}" or line.startswith("}, execution_thread=")


def _is_open(instruction: Instruction) -> bool:
    """Whether an instruction over several lines has unclosed braces."""
    rest = instruction.rest
    return "\n" in rest and rest.count("{") > rest.count("}")


def _closing(rest: str) -> int:
    """The position of the parenthesis that closes the operands."""
    stop = rest.find(")")
    if rest.find("(", 0, stop) == -1:
        return stop
    depth = 1
    for position, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return position
    return len(rest)

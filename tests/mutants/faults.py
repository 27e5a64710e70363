"""Mutation operators: small plausible faults at one place of a source file, drawn from its syntax.

| kind | mutation |
|---|---|
| compare | `<` for `<=`, `==` for `!=`, `in` for `not in`, `is` for `is not`, and back |
| logic | `and` for `or` and back, a `not` removed, a condition that is never true |
| arithmetic | `+` for `-` and back, `*` for `//`, `%` for `//`, a quotient rounded up |
| name | `min` for `max`, `ceil` for `floor`, `any` for `all` and back; `sorted`, `reversed`, `abs` and `set` removed |
| constant | a number plus one, True for False and back |
| filter | a comprehension without one of its conditions |
| choice | always one branch of `a if c else b` |
| statement | one removed: a call, an augmented assignment, `continue`, `break` |
| order | two arguments, or two elements of a tuple, swapped |
| bound | a slice that starts or stops one later, or without a bound |

Not mutated is code whose change no test should detect: messages of exceptions, assertions,
annotations, decorators, ``strict`` and ``copy``, and the code of modules and classes themselves, which runs on import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATIONS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.Mod: "//"}
NOT_DRAWN = {"strict", "copy"}
"""Arguments by name whose value changes no result."""
NAMES = {"min": "max", "max": "min", "ceil": "floor", "floor": "ceil", "any": "all", "all": "any"}
LEFT_OUT = {"sorted": "list", "reversed": "list", "abs": "", "set": "list", "frozenset": "tuple"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. ``old`` and ``new``: the statement around it, on one line; ``text``: the whole file with the fault.

    ``lines``: those of the statement; a test that runs one of them could detect the fault.
    """

    file: str
    function: str
    kind: str
    lines: tuple[int, int]
    old: str
    new: str
    text: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of a fault, which does not depend on line numbers."""
        return self.file, self.function, self.old, self.new


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a walk is: the function, and the statement whose own expressions these are."""

    function: str
    statement: ast.stmt


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """A place in a file, and the mistaken text for it."""

    path: Path
    function: str
    kind: str
    lines: tuple[int, int]
    node: ast.AST
    put: str


def slips_of(path: Path) -> Iterator[Slip]:
    """Every slip in a file, in the order of their places."""
    for place, kind, node, put in _slips(ast.parse(path.read_text(encoding="utf-8"))):
        yield Slip(path=path, function=place.function, kind=kind, lines=_span(place.statement), node=node, put=put)


def fault_of(slip: Slip, root: Path) -> Fault | None:
    """The fault that a slip causes in its file; None if the result is not Python, or is unchanged."""
    source = slip.path.read_text(encoding="utf-8")
    text = _spliced(source, slip.node, slip.put)
    if text is None or text == source:
        return None
    first, last = slip.lines
    grown = text.count("\n") - source.count("\n")
    return Fault(
        file=slip.path.relative_to(root).as_posix(),
        function=slip.function,
        kind=slip.kind,
        lines=slip.lines,
        old=_on_one_line(source, first, last),
        new=_on_one_line(text, first, last + grown),
        text=text,
    )


def _on_one_line(text: str, first: int, last: int) -> str:
    return " ".join(" ".join(text.splitlines()[first - 1 : last]).split())


def _span(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, of one with a body only those before it."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    last = statement.end_lineno or statement.lineno
    if body:
        first_inside = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
        last = max(statement.lineno, first_inside - 1)
    return statement.lineno, last


def _spliced(source: str, node: ast.AST, put: str) -> str | None:
    """The source with a node's text replaced; None where that is no Python."""
    start, stop = _offsets(source, node)
    text = source[:start] + put + source[stop:]
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text


def _offsets(source: str, node: ast.AST) -> tuple[int, int]:
    starts = _line_starts(source)

    def offset(line: int, column: int) -> int:
        begin = starts[line - 1]
        # Columns count bytes.
        return begin + len(source[begin : begin + column].encode()[:column].decode())

    assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


@cache
def _line_starts(source: str) -> tuple[int, ...]:
    starts, at = [], 0
    for line in source.splitlines(keepends=True):
        starts.append(at)
        at += len(line)
    return tuple(starts)


_Found = tuple[_Place, str, ast.AST, str]


def _slips(tree: ast.Module) -> Iterator[_Found]:
    for name, function in _functions(tree, ""):
        for statement in _statements(function.body):
            place = _Place(name, statement)
            yield from ((place, *slip) for slip in _of_statement(statement))
            for node in _expressions(statement):
                yield from ((place, *slip) for slip in _of_expression(node))


def _functions(node: ast.AST, around: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{around}.{child.name}" if around else child.name
            if isinstance(child, ast.FunctionDef):
                yield name, child
            yield from _functions(child, name)
        elif isinstance(child, ast.stmt):
            yield from _functions(child, around)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a function, including nested ones, but not those of a function inside it."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Assert | ast.Raise):
            continue
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, inner, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from _statements(case.body)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, not those of the statements in it."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        for name, value in ast.iter_fields(node):
            if name == "annotation" or (isinstance(node, ast.keyword) and node.arg in NOT_DRAWN):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    yield child
                if isinstance(child, ast.expr | ast.keyword | ast.comprehension | ast.withitem):
                    pending.append(child)


def _of_statement(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "statement", statement, "pass"
        case ast.If(test=test):
            yield "logic", test, "False"
        case _:
            pass


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST, str]]:
    text = ast.unparse
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "compare", node, f"({text(left)} {COMPARISONS[type(op)]} {text(right)})"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield "logic", node, "(" + other.join(f"({text(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", node, f"({text(operand)})"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            yield "arithmetic", node, f"(-(-({text(left)}) // ({text(right)})))"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS and not _is_text(left, right):
            yield "arithmetic", node, f"(({text(left)}) {OPERATIONS[type(op)]} ({text(right)}))"
        case ast.IfExp(body=body, orelse=orelse):
            yield "choice", node, f"({text(body)})"
            yield "choice", node, f"({text(orelse)})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, str(value + 1)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            yield from _without_a_filter(node)
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield "name", node.func, NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in LEFT_OUT:
            yield "name", node, f"{LEFT_OUT[name]}({text(first)})"
        case ast.Call(args=[first, second, *_]) if _named(first, second) and text(first) != text(second):
            yield "order", node, text(_swapped(node))
        case ast.Tuple(elts=[first, second], ctx=ast.Load()) if text(first) != text(second):
            yield "order", node, f"({text(second)}, {text(first)})"
        case ast.Slice(lower=lower, upper=upper, step=step):
            tail = f":{text(step)}" if step else ""
            if lower:
                yield "bound", lower, f"({text(lower)}) + 1"
                yield "bound", node, f":{text(upper) if upper else ''}{tail}"
            if upper:
                yield "bound", upper, f"({text(upper)}) + 1"
            if step and text(step) == "-1":
                yield "bound", node, ":"
        case _:
            pass


def _without_a_filter(node: ast.expr) -> Iterator[tuple[str, ast.AST, str]]:
    for number, part in enumerate(getattr(node, "generators", [])):
        for at in range(len(part.ifs)):
            copy = ast.parse(ast.unparse(node), mode="eval").body
            del copy.generators[number].ifs[at]  # pyright: ignore[reportAttributeAccessIssue]
            yield "filter", node, ast.unparse(copy)


def _swapped(call: ast.Call) -> ast.Call:
    first, second, *others = call.args
    return ast.Call(func=call.func, args=[second, first, *others], keywords=call.keywords)


def _named(*nodes: ast.expr) -> bool:
    """Whether each is a name: two names are easily confused."""
    return all(isinstance(node, ast.Name | ast.Attribute) for node in nodes)


def _is_text(*nodes: ast.expr) -> bool:
    """Whether one is certainly text: subtracting texts is not a plausible fault."""
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )

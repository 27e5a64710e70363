"""The help of a verb: its usage, what it does, and every argument and option with its description."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence

from shardwright.cli.arguments.declared import Declaration, Option, declaration
from shardwright.cli.arguments.verbs import Verb

COLUMN = 24
"""Where descriptions begin at most."""


def help_text(verb: Verb, width: int) -> str:
    """The help of a verb, in lines of ``width`` columns, broken at spaces."""
    listed = [("-h, --help", "Print this help.")]
    if len(verb.path) == 1:
        listed.append(("--version", "Print the version."))
    if verb.inner:
        usage = f"usage: {verb.typed} VERB [options]"
        summaries = [(name, _paragraphs(member.of)[0]) for name, member in verb.inner.items()]
        sections = [("verbs", summaries), ("options", listed)]
    else:
        declared = declaration(verb.of)
        needed = [option.typed for option in declared.options if option.positional or option.required]
        usage = " ".join(["usage:", verb.typed, *needed, "[options]"])
        sections = list(_sections(declared, listed))
    lines = _wrapped(usage, width, "  ")
    for paragraph in _paragraphs(verb.of):
        lines += ["", *_wrapped(paragraph, width)]
    longest = max(len(name) for _, entries in sections for name, _ in entries)
    column = min(longest + 4, COLUMN if width > 2 * COLUMN else COLUMN // 2)
    for heading, entries in sections:
        lines += ["", heading]
        for name, text in entries:
            lines += _entry(name, text, width, column)
    return "\n".join(lines)


def _sections(declared: Declaration, listed: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    arguments = [option for option in declared.own if option.positional]
    if arguments:
        yield "arguments", _entries(arguments)
    yield "options", [*listed, *_entries([option for option in declared.own if not option.positional])]
    for group in declared.groups.values():
        yield f"options of the {group.name}", _entries(group.own)


def _entries(options: Sequence[Option]) -> list[tuple[str, str]]:
    return [
        (option.typed, " ".join(filter(None, (_descriptions(option.of)[option.field], option.hint))))
        for option in options
    ]


def _entry(name: str, text: str, width: int, column: int) -> list[str]:
    lines = _wrapped(text, width, " " * column, " " * column)
    if len(name) + 3 > column:
        return [f"  {name}", *lines]
    return [f"  {name}".ljust(column) + lines[0].lstrip(), *lines[1:]]


def _wrapped(text: str, width: int, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [first]


def _paragraphs(of: type) -> list[str]:
    """The docstring of a dataclass, each paragraph one line."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(of.__doc__ or "").split("\n\n")]


def _descriptions(of: type) -> dict[str, str]:
    """What stands below each field of a dataclass."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    assert isinstance(node, ast.ClassDef)
    descriptions: dict[str, str] = {}
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                descriptions[name] = " ".join(text.split())
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                descriptions[name] = ""
            case _:
                pass
    return descriptions

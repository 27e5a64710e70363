"""Runs the examples of a Markdown document, in its order and in one folder of its own.

| fence | what is done |
|---|---|
| ```` ```python ```` | run; the blocks of a document are one program. A block with ``>>>`` is checked as a doctest |
| ```` ```console ```` | each line after ``$ `` is run by a shell; what follows must be what it prints, errors included |
| any, whose first line is a comment with only a file name, as ``# mine.yaml`` | written under that name |
| any other | left alone |

In expected output, ``...`` alone on a line stands for any lines, and within a line for any text. A command that
should fail says so: ``$ shardwright plan x || echo "exit code $?"``.
"""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 240

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_FILE_NAME = re.compile(r"(?:#|//|<!--) (?P<name>[\w./-]+\.\w+)(?: -->)?")


class ExampleError(AssertionError):
    """An example does not behave as its document shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: the word after its fence, its lines without the fence's indentation, where they begin."""

    language: str
    lines: tuple[str, ...]
    first_line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a console block, and its expected output."""

    text: str
    expected: tuple[str, ...]
    line: int


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a document. Raises ExampleError for a fence that is never closed."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    first_line, lines = 0, []
    for number, line in enumerate(markdown.splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None:
            if match is not None:
                opened, first_line, lines = match, number + 1, []
        elif match is not None and match["fence"].startswith(opened["fence"]) and not match["info"].strip():
            language = (opened["info"].split() or [""])[0]
            found.append(Block(language=language, lines=tuple(lines), first_line=first_line))
            opened = None
        else:
            lines.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ExampleError(f"line {first_line - 1}: this block is never closed")
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console block. Raises ExampleError for output before the first command."""
    found: list[Command] = []
    lines = list(enumerate(block.lines, start=block.first_line))
    while lines:
        number, line = lines.pop(0)
        if not line.startswith("$ "):
            raise ExampleError(f"line {number}: a console block begins with a command, after '$ '")
        text = line[2:]
        while text.endswith("\\") and lines:
            text += "\n" + lines.pop(0)[1].removeprefix("> ")
        expected = []
        while lines and not lines[0][1].startswith("$ "):
            expected.append(lines.pop(0)[1].rstrip())
        while expected and not expected[-1]:
            expected.pop()
        found.append(Command(text=text, expected=tuple(expected), line=number))
    return found


def matches(expected: tuple[str, ...], printed: str) -> bool:
    """Whether a text equals the expected one, except for ``...`` and space at the ends of lines.

    >>> matches(("loss ... at step 3", "...", "done"), "loss 5.01 at step 3\\n\\nsaved\\ndone\\n")
    True
    """
    parts = []
    for line in expected:
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*")
        else:
            parts.append(r"[^\n]*".join(re.escape(part) for part in line.split("...")) + r"\n")
    return re.fullmatch("".join(parts), _trimmed(printed)) is not None


def _trimmed(text: str) -> str:
    stripped = "\n".join(line.rstrip() for line in text.splitlines()).rstrip()
    return stripped + "\n" if stripped else ""


def run_document(path: Path, folder: Path, environment: Mapping[str, str]) -> int:
    """Run every example of a document in ``folder``; how many there were.

    Raises ExampleError, with the document's line, for the first example that does not do what it says.
    """
    program: dict[str, object] = {"__name__": "__main__"}
    count = 0
    here = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks(path.read_text(encoding="utf-8")):
            named = _FILE_NAME.fullmatch(block.lines[0].strip()) if block.lines else None
            if named is not None:
                target = folder / named["name"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("\n".join(block.lines[1:]) + "\n", encoding="utf-8")
            elif block.language == "python":
                _run_python(block, path, program)
                count += 1
            elif block.language == "console":
                for command in commands(block):
                    _run_command(command, path, folder, environment)
                    count += 1
    finally:
        os.chdir(here)
    return count


def _run_python(block: Block, path: Path, program: dict[str, object]) -> None:
    source = "\n".join(block.lines) + "\n"
    if any(line.startswith(">>> ") for line in block.lines):
        test = doctest.DocTestParser().get_doctest(source, program, path.name, str(path), block.first_line - 1)
        written: list[str] = []
        # Blocks share their names: each has those that earlier blocks defined.
        test.globs = program
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(
            test, out=written.append, clear_globs=False
        )
        if written:
            raise ExampleError(f"{path}:{block.first_line}:\n{''.join(written)}")
        return
    # Blank lines before it, so that a traceback names the document's line.
    code = compile("\n" * (block.first_line - 1) + source, str(path), "exec", dont_inherit=True)
    try:
        exec(code, program)
    except Exception as error:
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__ and error.__traceback__.tb_next else 0
        raise ExampleError(f"{path}:{line}: {type(error).__name__}: {error}") from error


def _run_command(command: Command, path: Path, folder: Path, environment: Mapping[str, str]) -> None:
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command.text],
        cwd=folder,
        env={**environment, **plain},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ExampleError(f"{path}:{command.line}: more than {TIMEOUT_S} s: $ {command.text}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise ExampleError(f"{path}:{command.line}: exit code {process.returncode}: $ {command.text}\n{printed}")
    if not matches(command.expected, printed):
        expected = "\n".join(command.expected)
        raise ExampleError(
            f"{path}:{command.line}: $ {command.text}\n--- the document says\n{expected}\n--- it prints\n{printed}"
        )

"""docs/compiled-moe.md: sending tokens to experts compared with gathering weights, line by line, on three targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.core.layout.roles import COMPONENTS
from tests.targets.cases import Case
from tests.targets.movements import Movement, Movements
from tests.targets.row import GB

HEAD = """# Tokens or weights, three targets

{model} under `ep` on {devices} devices, {batch} rows of {length:,} tokens, capacity 1.25, computed and stored in bfloat16. On
the left tokens are sent to the experts (`--move moe=all-to-all`), on the right the experts' weights are gathered
(`--move moe=weights`). Each compiler made the collectives that the layout requests: with tokens an all-to-all of the
component `moe` over `expert`, and no gather of expert weights; with weights the reverse.

Bytes are those that one device moves in a step, with the trip counts of loops; the number of executions is in brackets.
*same*: kind, axes and bytes are those of the plan. Other names are rewrites of the closed list in
[agreement.md](agreement.md). For an all-to-all of tokens the plan counts tokens, and the program its buffers, with the full
capacity (*room for all*; on CPU *chunks*). Written by `python -m tests.targets.table`.
"""

Key = tuple[str | None, str, tuple[str, ...]]


def moe_page(cases: Sequence[Case], found: Mapping[str, Movements]) -> str:
    """The page of the cases that were compiled: one table per target."""
    first = cases[0]
    assert first.mesh == "expert=8"
    head = HEAD.format(model=first.model, devices=8, batch=first.batch, length=first.length)
    targets = dict.fromkeys(case.chips for case in cases)
    tables = ["\n".join(_table(target, cases, found)) for target in targets]
    return head + "\n" + "\n\n".join(table for table in tables if table) + "\n"


def _table(target: str, cases: Sequence[Case], found: Mapping[str, Movements]) -> Iterator[str]:
    here = {case.move: found[case.name] for case in cases if case.chips == target and case.name in found}
    if len(here) < 2:
        return
    sides = [{_key(line): line for line in _joined(here[move].lines)} for move in sorted(here, key=str)]
    yield f"## {target}"
    yield ""
    yield "| component | kind | axes | tokens: predicted | compiled | how | weights: predicted | compiled | how |"
    yield "|---|---|---|---:|---:|---|---:|---:|---|"
    for key in sorted({key for side in sides for key in side}, key=_place):
        component, kind, axes = key
        cells = " | ".join(cell for side in sides for cell in _cells(side.get(key)))
        yield f"| {component or ''} | {kind} | {'/'.join(axes)} | {cells} |"


def _joined(lines: Sequence[Movement]) -> Iterator[Movement]:
    """One line per key, the largest: collectives that the plan leaves out may have a separate line of a few bytes."""
    for key in dict.fromkeys(_key(line) for line in lines):
        yield max((line for line in lines if _key(line) == key), key=lambda line: line.compiled_bytes)


def _place(key: Key) -> tuple[int, str, tuple[str, ...]]:
    """By component in the order of the forward pass, those without one last."""
    component, kind, axes = key
    return len(COMPONENTS) if component is None else COMPONENTS.index(component), kind, axes


def _key(line: Movement) -> Key:
    return line.component, line.kind, line.axes


def _cells(line: Movement | None) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    return (
        _bytes(line.predicted_bytes, line.predicted_count),
        _bytes(line.compiled_bytes, line.compiled_count),
        how(line),
    )


def how(line: Movement) -> str:
    """How a line of the plan was compiled, in a few words."""
    if line.state == "unmatched":
        return "**unmatched**"
    return ", ".join(line.explained_by) or "same"


def _bytes(size: int, times: int) -> str:
    """Bytes of a step, and how often.

    >>> _bytes(6442450944, 192), _bytes(53248, 65), _bytes(4, 1), _bytes(0, 0)
    ('6.44 GB (192)', '53 kB (65)', '4 B (1)', '')
    """
    if not size and not times:
        return ""
    for unit, name in ((GB, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit / 10 and size >= 1e3:
            return f"{size / unit:,.{2 if name == 'GB' else 1 if name == 'MB' else 0}f} {name} ({times})"
    return f"{size} B ({times})"

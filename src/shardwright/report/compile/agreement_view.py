"""Predicted and compiled collectives: a line for each component, kind and axes, and what explains a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import AgreementRow
from shardwright.compiled.agreement.rewrites import REWRITES
from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.units import pretty_bytes, several

STYLES = {"matched": "", "explained": "yellow", "unmatched": "bold red"}
NOTHING = "-"


def agreement_table(agreement: Agreement, colors: AxisColors, width: int) -> RenderableType:
    """Bytes of a step on one device. The letters in the last column are explained below: each is a rewrite and its reason."""
    if not agreement.rows:
        return Text("  none: the step has no collectives, as predicted", style="dim")
    letters = _letters(agreement.rows)
    columns = [Column(header="kind"), Column(header="axes", joins=True)]
    columns += [Column(header=name, right=True) for name in ("predicted", "compiled", "times")]
    columns += [Column(header="difference", right=True), Column(header="how")]
    groups = []
    for component in dict.fromkeys(row.component for row in agreement.rows):
        cells = [_cells(row, letters, colors) for row in agreement.rows if row.component == component]
        groups.append(RowGroup(heading=Text(component or "without a name", style="bold"), cells=cells))
    return Group(
        aligned(columns, groups, width),
        Text(""),
        *(paragraph(f"{letter}  {name}: {REWRITES[name].reason}", "dim") for name, letter in letters.items()),
        *([Text("")] if letters else []),
        _summary(agreement),
    )


def _letters(rows: Sequence[AgreementRow]) -> Mapping[str, str]:
    """A letter for each rewrite, in the order of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row.explained_by))
    return {name: chr(ord("a") + number) for number, name in enumerate(names)}


def _cells(row: AgreementRow, letters: Mapping[str, str], colors: AxisColors) -> list[Text]:
    style = STYLES[row.state]
    became = f"\nas {', '.join(row.compiled_as)}" if row.compiled_as else ""
    how = " ".join(letters[name] for name in row.explained_by) if row.state != "unmatched" else "unmatched"
    cells = [Text(row.kind + became, style=style), colors.axes(row.axes)]
    cells += [_bytes(row.predicted_bytes), _bytes(row.compiled_bytes)]
    both = (row.predicted_count, row.compiled_count)
    cells.append(Text(f"{both[0]:,}" if both[0] == both[1] else f"{both[0]:,} / {both[1]:,}"))
    return [*cells, Text(_difference(row), style=style), Text(how, style=style)]


def _bytes(number: int) -> Text:
    return Text(pretty_bytes(number) if number else NOTHING)


def _difference(row: AgreementRow) -> str:
    if row.difference == 0:
        return "same"
    if row.predicted_bytes and row.compiled_bytes:
        ratio = row.compiled_bytes / row.predicted_bytes
        return f"{ratio - 1:+.2%}" if 0.9 < ratio < 1.1 else f"x{ratio:.3g}"
    return f"{'+' if row.difference > 0 else '-'}{pretty_bytes(abs(row.difference))}"


def _summary(agreement: Agreement) -> RenderableType:
    matched, explained, unmatched = (agreement.of_state(state) for state in ("matched", "explained", "unmatched"))
    text = f"{several(len(matched), 'line')} as predicted, their bytes to within {agreement.bytes_error:.2%}"
    if explained:
        text += f"; {len(explained)} by a known rewrite, {agreement.explained_share:.2%} of all bytes"
    line = Text(text)
    if unmatched:
        line.append(f"; {len(unmatched)} unmatched", style=STYLES["unmatched"])
    return paragraph(line)

"""Columns line up in every group, and wrap between words."""

from __future__ import annotations

import io

from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned, natural_width, section
from shardwright.report.text.terminal import to_text

COLUMNS = [Column(header="name"), Column(header="what", flexible=True), Column(header="bytes", right=True)]


def rows(*cells: tuple[str, str, str], heading: str | None = None) -> RowGroup:
    return RowGroup(
        cells=[[Text(cell) for cell in row] for row in cells], heading=None if heading is None else Text(heading)
    )


def drawn(groups: list[RowGroup], width: int) -> str:
    return to_text(lambda _: aligned(COLUMNS, groups, width), io.StringIO(), width=200)


def test_all_groups_share_the_columns():
    groups = [
        rows(("a", "batch", "1 B"), heading="first"),
        rows(("longer", "embed/fsdp heads", "1024 B"), heading="second"),
    ]
    assert drawn(groups, 80) == (
        "    name    what               bytes\n"
        "  first\n"
        "    a       batch                1 B\n"
        "  second\n"
        "    longer  embed/fsdp heads  1024 B\n"
    )
    assert natural_width(COLUMNS, groups) == len("    longer  embed/fsdp heads  1024 B")


def test_the_flexible_column_wraps_between_words():
    groups = [rows(("a", "batch/data/fsdp length/expert embed", "1 B"))]
    assert drawn(groups, 38) == (
        "  name  what                     bytes\n"
        "  a     batch/data/fsdp            1 B\n"
        "        length/expert embed\n"
    )  # fmt: skip


def test_a_word_longer_than_its_column_is_broken():
    assert drawn([rows(("a", "x" * 30, "1 B"))], 27) == (
        "  name  what          bytes\n"
        "  a     xxxxxxxxxxxx    1 B\n"
        "        xxxxxxxxxxxx\n"
        "        xxxxxx\n"
    )  # fmt: skip


def test_a_chain_of_axes_is_broken_after_a_slash():
    assert drawn([rows(("a", "data/fsdp/expert/tensor", "1 B"))], 27) == (
        "  name  what          bytes\n"
        "  a     data/fsdp/      1 B\n"
        "        expert/\n"
        "        tensor\n"
    )  # fmt: skip


def test_a_cell_of_several_lines():
    assert drawn([rows(("a", "at rest\n-> in use", "1 B"), ("b", "", "2 B"))], 80) == (
        "  name  what       bytes\n"
        "  a     at rest      1 B\n"
        "        -> in use\n"
        "  b                  2 B\n"
    )  # fmt: skip


def test_without_headers_there_is_no_line_for_them():
    columns = [Column(header=""), Column(header="")]
    groups = [RowGroup(cells=[[Text("a"), Text("b")]])]
    assert to_text(lambda _: aligned(columns, groups, 80), io.StringIO()) == "  a  b\n"


def test_a_section_ends_with_an_empty_line():
    assert to_text(lambda _: section("title", Text("body")), io.StringIO()) == "title\nbody\n\n"

"""Columns line up in every group, and wrap between words."""

from __future__ import annotations

import io

from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned, natural_width, section
from shardwright.report.text.terminal import to_text
from shardwright.report.text.wrapping import wrapped

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


def test_a_table_too_narrow_for_its_words_is_stacked():
    groups = [rows(("a", "data/fsdp/expert/tensor", "1 B"), ("b", "x", "111 MiB"), heading="first")]
    assert drawn(groups, 36) == (
        "  first\n"
        "    a  what data/fsdp/expert/tensor\n"
        "      bytes 1 B\n"
        "    b  what x  bytes 111 MiB\n"
    )  # fmt: skip


def test_a_word_longer_than_the_line_makes_it_longer():
    assert drawn([rows(("a", f"b {'x' * 30}", "1 B"))], 27) == f"  a\n    what b\n    {'x' * 30}\n    bytes 1 B\n"


def test_where_there_is_no_room_a_column_joins_the_one_before_it():
    columns = [Column(header="kind"), Column(header="axes", joins=True), Column(header="bytes", right=True)]
    group = rows(("all-gather", "data/fsdp/expert", "1 B"), ("send", "", "2 B"))
    texts = [to_text(lambda _, n=n: aligned(columns, [group], n), io.StringIO(), width=200) for n in (40, 30)]
    assert texts == [
        "  kind        axes              bytes\n"
        "  all-gather  data/fsdp/expert    1 B\n"
        "  send                            2 B\n",
        "  kind axes              bytes\n"
        "  all-gather               1 B\n"
        "  data/fsdp/expert\n"
        "  send                     2 B\n",
    ]  # fmt: skip


def test_a_number_stays_beside_its_unit():
    text = Text("it takes 28.4 s of 112 MiB, 5 stages")
    assert [line.plain for line in wrapped(text, 13)] == ["it takes", "28.4 s of", "112 MiB, 5", "stages"]


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

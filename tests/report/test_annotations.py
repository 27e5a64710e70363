"""An annotation is read back by the rules of GitHub's runner, for any text in the finding and the file's name."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.report.interop.annotations import annotation, command, error_annotation

FINDING = Finding(
    code="SW601",
    severity="error",
    where="llama3-test under mine",
    position=Position(source="mine.yaml", line=3, column=5),
    found="1 weight moved, since a,b.json was written\n100% of it: 50% -> 25%",
    needed="what a,b.json holds",
)


def as_the_runner_reads(line: str) -> tuple[str, dict[str, str], str]:
    """Command, properties and message of a workflow command: properties end at the first '::' after the name, are parted
    by ',', and each at its first '='; only then are escapes undone, '%25' last."""
    assert "\n" not in line
    assert "\r" not in line
    assert line.startswith("::")
    head, message = line[2:].split("::", 1)
    name, _, rest = head.partition(" ")
    properties = dict(pair.split("=", 1) for pair in rest.strip().split(",") if pair)

    def undone(text: str, escapes: tuple[tuple[str, str], ...]) -> str:
        for escape, char in escapes:
            text = text.replace(escape, char)
        return text

    lines = (("%0D", "\r"), ("%0A", "\n"))
    of_properties = (*lines, ("%3A", ":"), ("%2C", ","), ("%25", "%"))
    return (
        name,
        {key: undone(value, of_properties) for key, value in properties.items()},
        undone(message, (*lines, ("%25", "%"))),
    )


def test_a_finding():
    line = annotation(FINDING, FINDING.position, {})
    assert line == (
        "::error file=mine.yaml,line=3,col=5,title=SW601%3A A locked layout changes only together with its lock.::"
        "where: mine.yaml:3:5: llama3-test under mine%0Afound: 1 weight moved, since a,b.json was written%0A"
        "100%25 of it: 50%25 -> 25%25%0Aneeded: what a,b.json holds"
    )
    name, properties, message = as_the_runner_reads(line)
    assert name == "error"
    assert properties == {"file": "mine.yaml", "line": "3", "col": "5", "title": f"SW601: {FINDING.law}"}
    assert message.splitlines() == [
        "where: mine.yaml:3:5: llama3-test under mine",
        "found: 1 weight moved, since a,b.json was written",
        "100% of it: 50% -> 25%",
        "needed: what a,b.json holds",
    ]


@pytest.mark.parametrize(("severity", "word"), [("error", "error"), ("warning", "warning"), ("info", "notice")])
def test_github_has_its_own_words_for_severities(severity, word):
    finding = Finding(code="SW603", severity=severity, where="x", found="y", needed="z")
    assert as_the_runner_reads(annotation(finding, Position(source="x", line=1, column=1), {}))[0] == word


ODD = st.text(string.ascii_letters + " %:,=\r\n0123456789ADC;]#é", min_size=1)


@given(title=ODD, message=ODD)
def test_any_text_comes_back(title, message):
    place = Position(source="a", line=7, column=1)
    name, properties, read = as_the_runner_reads(command("warning", place, title, message, {}))
    # The runner strips blanks from the ends of all properties together, of which the title is the last.
    blanks = " "
    assert (name, properties["line"], read) == ("warning", "7", message)
    assert properties["title"] == title.rstrip(blanks)


@pytest.mark.parametrize("name", ["a,b.yaml", "100%.yaml", "a:b.yaml", "a\nb.yaml", "a=b.yaml", "::x::.yaml"])
def test_names_of_files(name):
    line = error_annotation("gone", name, {})
    assert as_the_runner_reads(line)[1]["file"] == name


def test_files_are_named_from_the_root_of_the_repository(tmp_path, monkeypatch):
    (tmp_path / "repo" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repo" / "sub")

    def named(path: str, **environment: str) -> str:
        return as_the_runner_reads(error_annotation("gone", path, environment))[1]["file"]

    workspace = str(tmp_path / "repo")
    assert named("x.json", GITHUB_WORKSPACE=workspace) == "sub/x.json"
    assert named("../locks/x.json", GITHUB_WORKSPACE=workspace) == "locks/x.json"
    assert named(str(tmp_path / "repo" / "x.json"), GITHUB_WORKSPACE=workspace) == "x.json"
    assert named("../../x.json", GITHUB_WORKSPACE=workspace) == "../../x.json"
    assert named("./x.json") == "x.json"
    Path("link").symlink_to(tmp_path / "repo")
    assert named("link/x.json", GITHUB_WORKSPACE=workspace) == "x.json"

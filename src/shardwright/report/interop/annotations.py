"""Findings and errors as GitHub Actions workflow commands, one line each: `::error file=...,line=...,title=...::message`.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position

COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
"""The command for each severity."""


def annotation(finding: Finding, place: Position, environment: Mapping[str, str]) -> str:
    """The line for a finding. ``place``: in a file of the repository."""
    title = f"{finding.code}: {finding.law}"
    message = "\n".join(f"{label}: {text}" if label else text for label, text in finding.lines())
    return command(COMMANDS[finding.severity], place, title, message, environment)


def error_annotation(message: str, path: str, environment: Mapping[str, str]) -> str:
    """The line for a file that cannot be checked."""
    here = Position(source=path, line=1, column=1)
    return command("error", here, "this lock cannot be checked", message, environment)


def command(name: str, place: Position, title: str, message: str, environment: Mapping[str, str]) -> str:
    """
    >>> here = Position(source="a,b.yaml", line=3, column=5)
    >>> command("error", here, "SW601: it moved", "100% of it\\nmoved: all", {})
    '::error file=a%2Cb.yaml,line=3,col=5,title=SW601%3A it moved::100%25 of it%0Amoved: all'
    """
    values = {
        "file": _from_workspace(place.source, environment),
        "line": str(place.line),
        "col": str(place.column),
        "title": title,
    }
    properties = ",".join(f"{key}={_property(value)}" for key, value in values.items())
    return f"::{name} {properties}::{_data(message)}"


def _from_workspace(path: str, environment: Mapping[str, str]) -> str:
    """A file's path relative to the root of the repository, for a step that runs in any folder of it."""
    workspace = environment.get("GITHUB_WORKSPACE")
    if workspace:
        near = os.path.relpath(os.path.realpath(path), os.path.realpath(workspace))
        if not near.startswith("../"):
            return near
    return os.path.normpath(path)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

"""Shared by tests of locks: a layout file, and commands that run in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli.main import main

LAYOUT = """\
name: mine
mesh: {fsdp: 2, expert: 4}
roles:
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
"""
MOVED = LAYOUT.replace("elsewhere: context", "elsewhere: fsdp")
LOCK = "mixtral-test.mine.lock.json"
LOCKING = ("lock", "mixtral-test", "--layout", "mine.yaml", "--set", "num_layers=2")

Typed = Callable[..., tuple[int, str, str]]


def typing(capsys: pytest.CaptureFixture[str]) -> Typed:
    """A command's exit code, what it prints, and what it says on stderr."""

    def typed(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return typed


def change(lock: Path, edit: Callable[[dict], object]) -> None:
    """Put a lock there that another version, or a hand, has written."""
    data = json.loads(lock.read_text(encoding="utf-8"))
    edit(data)
    lock.write_text(json.dumps(data), encoding="utf-8")

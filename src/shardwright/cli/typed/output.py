"""The output of a command: text for people, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from shardwright.report.text.terminal import View


def write_json(value: Mapping[str, object]) -> None:
    """Write one JSON object to stdout."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def write_view(view: View, stream: TextIO) -> None:
    # This imports rich, which a verb with --json does not need.
    from shardwright.report.text.terminal import to_text

    stream.write(to_text(view, stream))

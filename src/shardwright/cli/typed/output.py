"""What the command line writes: text for people, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from shardwright.report.text.terminal import View


def write_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def write_view(view: View, stream: TextIO) -> None:
    # Drawing loads rich, which a verb with --json never needs.
    from shardwright.report.text.terminal import to_text

    stream.write(to_text(view, stream))

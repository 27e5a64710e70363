"""Random damage to a text, to a JSON value, and to a command line."""

from __future__ import annotations

import random
import re
from typing import Any

ODD_TEXTS = (
    "", " ", "0", "-1", "1e309", "nan", "inf", "null", "~", "true", "[]", "{}", "[[]]", "'", '"', "\\", "%s", "{0}", "\x00", "\u202e",
    "é", "𝔘", "a" * 5000, "9" * 30, "1_000", "0x10", "1.5", "auto", "fsdp", "expert", "tensor", "../x", "*", "&a", "!!python/object:os",
    "<<", "? ", "- ", "\t", "\r\n", "a: b: c", "@", "`", "|", ">", "#",
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 8, 10**6, 2**31, 2**63, 10**18, 10**30, 1.5, -0.0, 1e300, True, False)
BRACKETS = "[](){}"


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return draw.choice(ODD_NUMBERS)
    if kind < 4:
        return draw.choice(ODD_TEXTS)
    if kind == 4:
        return None
    if kind == 5:
        return [odd_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(ODD_TEXTS): odd_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    value: Any = draw.choice((1, "x", None))
    for _ in range(draw.choice((5, 60, 400))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def damaged_text(draw: random.Random, text: str) -> str:
    """A text with a few places changed."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        text = draw.choice(TEXT_DAMAGE)(draw, text)
    return text[:200_000]


def _truncate(draw: random.Random, text: str) -> str:
    return text[: draw.randrange(len(text) + 1)]


def _drop_line(draw: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        del lines[draw.randrange(len(lines))]
    return "".join(lines)


def _double_line(draw: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    return "".join(lines)


def _indent(draw: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        place = draw.randrange(len(lines))
        lines[place] = draw.choice(("  ", " ", "\t", "")) + lines[place].lstrip()
    return "".join(lines)


def _number(draw: random.Random, text: str) -> str:
    return _token(draw, text, r"-?\d+(\.\d+)?", str(draw.choice(ODD_NUMBERS)))


def _word(draw: random.Random, text: str) -> str:
    words = re.findall(r"[A-Za-z_][\w.-]*", text)
    new = draw.choice(words) if words and draw.random() < 0.6 else draw.choice(ODD_TEXTS)
    return _token(draw, text, r"[A-Za-z_][\w.-]*", new)


def _typo(draw: random.Random, text: str) -> str:
    place = draw.randrange(len(text) + 1)
    return text[:place] + draw.choice("abcxyz_:,-=.'\"[]{}()#\n 019") + text[place + draw.randrange(2) :]


def _insert(draw: random.Random, text: str) -> str:
    place = draw.randrange(len(text) + 1)
    return text[:place] + draw.choice(ODD_TEXTS) + text[place:]


def _nest(draw: random.Random, text: str) -> str:
    place = draw.randrange(len(text) + 1)
    return text[:place] + draw.choice(BRACKETS + "-") * draw.choice((1, 2, 50, 1000)) + text[place:]


def _token(draw: random.Random, text: str, pattern: str, new: str) -> str:
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    chosen = draw.choice(found)
    return text[: chosen.start()] + new + text[chosen.end() :]


TEXT_DAMAGE = (
    _truncate,
    _drop_line,
    _double_line,
    _indent,
    _number,
    _number,
    _word,
    _word,
    _word,
    _typo,
    _typo,
    _insert,
    _nest,
)


def damaged_value(draw: random.Random, value: Any) -> Any:
    """A value with a few places changed: keys dropped or duplicated under other names, values swapped."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        found = list(places(value))
        if not found:
            return odd_value(draw)
        owner, key = draw.choice(found)
        kind = draw.randrange(6)
        if kind == 0:
            del owner[key]
        elif kind == 1:
            other, place = draw.choice(found)
            owner[key] = other.get(place) if isinstance(other, dict) else other[place] if place < len(other) else None
        elif kind == 2 and isinstance(owner, dict):
            owner[draw.choice(ODD_TEXTS)] = owner[key]
        elif kind == 3 and isinstance(owner, list):
            owner.insert(key, owner[key])
        elif kind == 4 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = draw.choice((owner[key] + 1, -owner[key], owner[key] * 2, draw.choice(ODD_NUMBERS)))
        else:
            owner[key] = odd_value(draw)
    return value


def places(value: Any, depth: int = 0):
    """Places where a value may be changed, up to some thousands; a value that contains itself does not cause an endless loop."""
    if depth > 30:
        return
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, item in items[:400]:
        yield value, key
        yield from places(item, depth + 1)


def damaged_arguments(draw: random.Random, arguments: list[str]) -> list[str]:
    """A command line with a few words changed."""
    arguments = list(arguments)
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        place = draw.randrange(len(arguments) + 1)
        kind = draw.randrange(5)
        if kind == 0 and arguments:
            del arguments[min(place, len(arguments) - 1)]
        elif kind == 1 and arguments:
            arguments.insert(place, draw.choice(arguments))
        elif kind == 2 and arguments:
            place = min(place, len(arguments) - 1)
            arguments[place] = damaged_text(draw, arguments[place])[:200]
        elif kind == 3 and arguments:
            arguments[min(place, len(arguments) - 1)] = str(draw.choice((*ODD_NUMBERS, *ODD_TEXTS)))
        else:
            arguments.insert(
                place, draw.choice(("--json", "--help", "--", "-x", "--modle", *map(str, ODD_NUMBERS[:5])))
            )
    return arguments

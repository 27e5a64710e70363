"""Names by patterns in which ``*`` stands for any text, as users give them for tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest

SHOWN = 5


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, in which ``*`` stands for any text.

    >>> matches("blocks.0.q", "blocks.*"), matches("blocks.0.q", "blocks")
    (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def chosen(names: Iterable[str], patterns: Sequence[str] | str | None, option: str = "only") -> frozenset[str]:
    """The names that match one of the patterns; all without patterns. A text is one pattern. Raises InputError for a pattern that matches no name.

    ``option``: what gave the patterns, for the error.
    """
    known = list(names)
    if patterns is None:
        return frozenset(known)
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            near = nearest(pattern.strip("*./"), known, 0.4)
            hint = (
                f"Did you mean '{near}'?" if near else f"There are {names_of(known)}." if known else "There are none."
            )
            raise InputError(f"{option}: the pattern '{pattern}' matches no name. {hint}")
    return frozenset(name for name in known if any(matches(name, pattern) for pattern in patterns))


def names_of(names: Sequence[str]) -> str:
    """The first few names of a list, for a message.

    >>> names_of(["a", "b"]), names_of(list("abcdefg"))
    ("'a' and 'b'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    shown = [f"'{name}'" for name in names[:SHOWN]]
    shown += [f"{len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"

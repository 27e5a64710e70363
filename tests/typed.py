"""Command lines of tests that replace some options of a common beginning."""

from __future__ import annotations

from collections.abc import Sequence

SEVERAL = {"--set", "--optimizer-set", "--xla", "--weights-new", "--weights-skip"}
"""Options that may occur several times."""


def once(arguments: Sequence[str]) -> list[str]:
    """The arguments with the last of each option that may occur once.

    >>> once(["train", "m", "--batch", "8", "--set", "a=1", "b=2", "--resume", "--batch", "16"])
    ['train', 'm', '--set', 'a=1', 'b=2', '--resume', '--batch', '16']
    """
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    last = {group[0].partition("=")[0]: number for number, group in enumerate(groups) if group}
    kept = (
        group
        for number, group in enumerate(groups)
        if group and (number == 0 or group[0] in SEVERAL or last[group[0].partition("=")[0]] == number)
    )
    return [argument for group in kept for argument in group]

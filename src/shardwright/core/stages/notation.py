"""The units of each stage in the notation of Megatron's ``--pipeline-model-parallel-layout``.

E is the embedding, t a layer, L the logits with the loss; ``|`` ends a stage; ``*3`` repeats the letter or the group in parentheses before
it; commas and blanks mean nothing: ``Et*3|(tt|)*29,L``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwright.core.findings.errors import InputError

MOST_LETTERS = 100_000
"""More than any model has, so that a repetition of repetitions ends."""
DEEPEST = 20
"""Groups in groups, more than anyone writes."""


def read_stages(text: str, where: str = "--stages") -> tuple[str, ...]:
    """The letters of each stage.

    >>> read_stages("Et*3|(tt|)*2,L")
    ('Ettt', 'tt', 'tt', 'L')

    Raises InputError for anything else, with the column.
    """
    letters, end = _group(text, 0, where, depth=0)
    assert end == len(text)
    return tuple(letters.split("|"))


def stages_text(stages: Sequence[str]) -> str:
    """The shortest text of the forms that people write: runs of a letter, and runs of equal stages.

    >>> stages_text(["Ettt", "tt", "tt", "L"]), stages_text(["tttt", "tttt"])
    ('Et*3|(tt|)*2L', 't*4|t*4')
    """
    found, left = "", len(stages)
    for letters, run in groupby(stages):
        number = len(list(run))
        left -= number
        text = _letters_text(letters)
        # The last stage has no bar behind it.
        repeated = number if left else number - 1
        if repeated >= 2:
            found += f"({text}|)*{repeated}"
        else:
            found += f"{text}|" * repeated
        found += "" if left else text
    return found


def _letters_text(letters: str) -> str:
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return "".join(letter * number if number < 3 else f"{letter}*{number}" for letter, number in runs)


def _group(text: str, at: int, where: str, *, depth: int) -> tuple[str, int]:
    """The letters of a group that begins at a column, and the column behind them. ``depth``: the groups that it is in, and itself."""
    found, last = "", ""
    while at < len(text):
        sign = text[at]
        if sign in ", \t":
            at += 1
        elif sign == ")":
            if not depth:
                raise _fault(text, at, where, "')' without '('")
            return found, at
        elif sign == "(":
            if depth == DEEPEST:
                raise _fault(text, at, where, f"more than {DEEPEST} groups, one in the other")
            opened = at
            last, at = _group(text, at + 1, where, depth=depth + 1)
            if at == len(text):
                raise _fault(text, opened, where, "'(' without ')'")
            found, at = found + last, at + 1
        elif sign == "*":
            number, end = _number(text, at, where)
            if not last:
                raise _fault(text, at, where, "'*' repeats nothing")
            if len(found) + len(last) * number > MOST_LETTERS:
                raise _fault(text, at, where, f"'*{number}' makes more than {MOST_LETTERS:,} letters")
            found, last, at = found + last * (number - 1), "", end
        elif sign in "EtL|":
            found, last, at = found + sign, sign, at + 1
        elif sign == "m":
            raise _fault(text, at, where, "'m' is a layer that predicts further tokens, which no model has here")
        else:
            raise _fault(text, at, where, f"{sign!r} is none of E, t, L, |, *, ( and )")
    return found, at


def _number(text: str, at: int, where: str) -> tuple[int, int]:
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    digits = text[at + 1 : end]
    # More digits than a number that is accepted has, and fewer than Python reads.
    number = int(digits[:30] or 0)
    if number < 1:
        raise _fault(text, at, where, "'*' needs a number of at least 1 behind it")
    return number, end


def _fault(text: str, at: int, where: str, what: str) -> InputError:
    return InputError(
        f"{where}: column {at + 1} of {text[:80]!r}: {what}. Write each stage's units, as 'Et*3|(tt|)*29L': E the embedding, t a layer, L the "
        f"logits, | between stages."
    )

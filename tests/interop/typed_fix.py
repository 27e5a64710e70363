"""A fix as a user would apply it: its text is typed into the file at the position of the finding, without other knowledge."""

from __future__ import annotations

import re

RULE = r"\[\w+, \[[^]]*\]\]"


def typed(text: str, fix: str, line: int) -> str:
    """The text after a fix. ``line``: that of the finding. Raises ValueError for a fix that has nothing to type."""
    lines = text.splitlines()
    if match := re.fullmatch(rf"Write '({RULE})' above line (\d+), and '({RULE})' below it\.", fix):
        above, number, below = match[1], int(match[2]), match[3]
        lines[number - 1 : number] = [f"  - {above}", lines[number - 1], f"  - {below}"]
        # A rule that is written again is at its new place only.
        lines = _once(lines, above)
    elif match := re.fullmatch(rf"Write '({RULE})' and '({RULE})' above line (\d+)\.", fix):
        first, second, number = match[1], match[2], int(match[3])
        lines[number - 1 : number - 1] = [f"  - {first}", f"  - {second}"]
        lines = _once(lines, first)
    elif match := re.fullmatch(rf"Write '({RULE})' in place of line (\d+)\.", fix):
        lines[int(match[2]) - 1] = f"  - {match[1]}"
    elif match := re.fullmatch(rf"Add '({RULE})' below line (\d+)\.", fix):
        lines.insert(int(match[2]), f"  - {match[1]}")
    elif match := re.fullmatch(r"Take line (\d+) out\.", fix):
        del lines[int(match[1]) - 1]
    elif match := re.fullmatch(rf"Write '({RULE})'\.", fix):
        name = match[1].split(",")[0]
        here = [number for number, each in enumerate(lines) if each.strip().removeprefix("- ").startswith(f"{name},")]
        if here:
            lines[here[0]] = f"  - {match[1]}"
        else:
            lines.append(f"  - {match[1]}")
    elif match := re.fullmatch(r"Write '(\w+): (\w+)'\.", fix):
        lines = [each for each in lines if not each.startswith(f"{match[1]}:")]
        lines.insert(0, f"{match[1]}: {match[2]}")
    elif match := re.fullmatch(r"Take '(\w+)' out\.", fix):
        of_key = (f"{match[1]}:", f"{match[1]}=")
        if any(each.startswith(of_key) for each in lines):
            lines = [each for each in lines if not each.startswith(of_key)]
        else:
            start = next(number for number, each in enumerate(lines) if each.startswith("logical_axis_rules"))
            lines[start:] = [_without(each, match[1]) for each in lines[start:]]
    elif match := re.fullmatch(r"Take the rule for '(\w+)' out, which the base has already\.", fix):
        lines = [each for each in lines if not each.strip().removeprefix("- ").startswith(f"[{match[1]},")]
    elif match := re.fullmatch(r"Write '(\w+)'\.", fix):
        lines[line - 1] = _nearest_replaced(lines[line - 1], match[1])
    else:
        raise ValueError(fix)
    return "\n".join(lines) + "\n"


def _once(lines: list[str], rule: str) -> list[str]:
    """The lines with only the first of those that hold a rule."""
    found = False
    kept = []
    for each in lines:
        same = each.strip() == f"- {rule}"
        if not (same and found):
            kept.append(each)
        found = found or same
    return kept


def _without(line: str, axis: str) -> str:
    line = re.sub(rf", {axis}\b", "", line)
    return (
        re.sub(rf"\[{axis}(, )?", "[", line)
        if f"[{axis}" in line and not line.strip().startswith(f"- [{axis},")
        else line
    )


def _nearest_replaced(line: str, word: str) -> str:
    """The line with the word most similar to ``word`` replaced by it."""
    from difflib import get_close_matches

    words = [each for each in re.findall(r"\w+", line) if each != word]
    (wrong,) = get_close_matches(word, words, n=1, cutoff=0.6)
    return re.sub(rf"\b{wrong}\b", word, line, count=1)

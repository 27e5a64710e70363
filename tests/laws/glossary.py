"""Words that the glossary replaces by a term of the field, wherever a text uses one all the same."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TABLE = re.compile(r"^## Words that the project does not use\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
KEYS: Mapping[str, str] = {"src/shardwright/interop/maxtext/importing.py": '"cuts"'}
"""Keys of JSON contracts, which stay as they are: by file, the text that is not read."""

UPSTREAM = {"alibi slopes"}
"""Names of arguments that users of other programs give."""

TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Tokens with prose; from Python 3.12 on, an f-string is several tokens."""

QUOTED = re.compile(r"``[^`\n]+``|`[^`\n]+`")


def banned(page: str) -> Mapping[str, str]:
    """The words of the glossary's last table, each with the terms to use.

    >>> banned("## Words that the project does not use\\n\\n| word | term |\\n|---|---|\\n| cut, cuts | shard |\\n")
    {'cut': 'shard', 'cuts': 'shard'}
    """
    found = TABLE.search(page)
    assert found is not None
    rows = [line.strip("|").split("|") for line in found[1].splitlines() if line.startswith("| ")][1:]
    return {word.strip(): term.strip() for words, term in rows for word in words.split(",")}


def violations(files: Iterable[Path], root: Path, words: Mapping[str, str]) -> list[str]:
    """Each line of a file that uses one of the words, with the place and the term to use."""
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(?![\w-])", re.IGNORECASE)
    wrong = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for number, prose in _of_python(text) if path.suffix == ".py" else _of_page(text):
            name = path.relative_to(root).as_posix()
            if prose == KEYS.get(name) or prose in UPSTREAM:
                continue
            for found in pattern.finditer(QUOTED.sub("", prose)):
                wrong.append(f"{name}:{number}: '{found[0]}': write {words[found[0].lower()]}")
    return wrong


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page, but for the table of the words itself."""
    found = TABLE.search(text)
    table = range(text.count("\n", 0, found.start()), text.count("\n", 0, found.end())) if found else ()
    for number, line in enumerate(text.splitlines()):
        if number not in table:
            yield number + 1, line


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """The comments, the texts and the names of a source file: names are read as words, ``cut_by`` as 'cut by'."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXTS:
            for line, prose in enumerate(token.string.splitlines()):
                yield token.start[0] + line, prose
        elif token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " ")

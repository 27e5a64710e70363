"""The page of a finding's code: in the installed package, or in docs/findings of a clone."""

from __future__ import annotations

from pathlib import Path

from shardwright.core.findings.codes import CODES
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "core" / "findings" / "pages", PACKAGE.parents[1] / "docs" / "findings")


def page_of(code: str) -> str:
    """The page of a code as Markdown. Raises InputError for one that does not exist.

    >>> page_of("sw312").splitlines()[0]
    '# SW312: more memory than the chip has'
    """
    name = code.upper()
    if name not in CODES:
        raise InputError(f"'{code}' is no code of a finding. {did_you_mean(name, CODES)}")
    for folder in FOLDERS:
        if (page := folder / f"{name}.md").is_file():
            return page.read_text(encoding="utf-8")
    raise InputError(
        f"the page of {name} is not in this installation. Its law: {CODES[name].law} Install the package again, for its pages."
    )

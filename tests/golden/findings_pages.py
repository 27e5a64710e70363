"""The pages of docs/findings: their sections, and the findings that the command of each section prints."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from shardwright.cli.main import main
from shardwright.core.findings.effect import Effect, Price
from shardwright.core.findings.finding import Finding

FOLDER = Path(__file__).parents[2] / "docs" / "findings"
SECTIONS = ("Wrong", "Why", "Right", "Cost")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page by its code: the text before the first section, and the text of each section."""

    code: str
    head: str
    sections: dict[str, str]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.code}.md"

    def block(self, section: str, language: str) -> str:
        """The one fenced block of a section in a language."""
        (block,) = [text for word, text in FENCE.findall(self.sections[section]) if word == language]
        return block


def page_of(code: str) -> Page:
    head, *parts = re.split(r"^## ", (FOLDER / f"{code}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = (part.split("\n", 1) for part in parts)
    return Page(code=code, head=head, sections=dict(named))


def findings_of(page: Page, section: str, folder: Path) -> tuple[Finding, ...]:
    """The findings that the last command of a section prints with --json, in a folder with its layout files.

    Files and commands come one after another, as they stand.
    """
    printed = StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        for language, text in FENCE.findall(page.sections[section]):
            if language == "yaml":
                name, content = text.split("\n", 1)
                Path(name.removeprefix("# ")).write_text(content, encoding="utf-8")
            elif language == "sh":
                for line in text.splitlines():
                    program, *arguments = shlex.split(line)
                    assert program == "shardwright"
                    printed = StringIO()
                    with redirect_stdout(printed), redirect_stderr(StringIO()):
                        main([*arguments, "--json"])
    finally:
        os.chdir(before)
    return tuple(_finding(data) for data in json.loads(printed.getvalue())["findings"])


def _effect(data: dict) -> Effect:
    numbers = ("seconds", "bytes_per_device", "tokens", "devices")
    before, after = (Price(**{name: data[name][side] for name in numbers}) for side in (0, 1))
    return Effect(before=before, after=after, text=data["text"])


def _finding(data: dict) -> Finding:
    texts = {key: data[key] for key in ("code", "severity", "where", "found", "needed", "fix", "cost")}
    return Finding(
        **texts,
        effect=_effect(data["effect"]) if "effect" in data else None,
        tried=data.get("tried", ""),
        tensor=data.get("tensor"),
        notation=data.get("notation"),
        mark=tuple(data["mark"]) if "mark" in data else None,
    )


def of_the_page(page: Page, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings of a page's code; of SW121, which every layout has, only those with a fix."""
    return tuple(f for f in findings if f.code == page.code and (f.fix or page.code != "SW121"))


def shown(page: Page, folder: Path) -> str:
    """The text that the page shows below its wrong layout: the first finding of its code."""
    return of_the_page(page, findings_of(page, "Wrong", folder))[0].text() + "\n"

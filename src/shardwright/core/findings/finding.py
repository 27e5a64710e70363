"""A finding: the result of a check, in one form for terminal, exception, JSON and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.core.findings.codes import CODES, SEVERITIES, Severity
from shardwright.core.findings.effect import Effect
from shardwright.core.findings.position import Position, caret


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The law, where it is broken, what was found and needed, the fix, and the cost.

    ``notation`` and ``mark`` place a caret under the part of a spec that the finding is about. ``fix`` and ``cost``
    are empty where there is none; a fix is resolved and checked before it is set here. On a machine ``effect`` is what the fix does to the
    step, and ``tried`` says why there is no fix, where each one that would end the finding is worse.
    """

    code: str
    severity: Severity
    where: str
    found: str
    needed: str
    fix: str = ""
    cost: str = ""
    tensor: str | None = None
    position: Position | None = None
    notation: str | None = None
    mark: tuple[int, int] | None = None
    effect: Effect | None = None
    tried: str = ""

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def law(self) -> str:
        return CODES[self.code].law

    @property
    def place(self) -> str:
        """``where``, after file, line and column if they are known."""
        return f"{self.position}: {self.where}" if self.position else self.where

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs below the head line; the spec with its caret has an empty label."""
        rows = [("where", self.place)]
        if self.notation is not None and self.mark is not None:
            rows.append(("", caret(self.notation, *self.mark, indent="")))
        rows += [("found", self.found), ("needed", self.needed)]
        effect = "" if self.effect is None else self.effect.text
        rows += [
            (label, text)
            for label, text in (("fix", self.fix), ("step", effect), ("tried", self.tried), ("cost", self.cost))
            if text
        ]
        return rows

    def text(self) -> str:
        """The finding as plain text, without colours."""
        head = f"{self.severity} {self.code}: {self.law}"
        body = []
        for label, text in self.lines():
            first, *rest = text.split("\n")
            body.append(f"  {label:<6} {first}".rstrip())
            body += [f"  {'':<6} {line}".rstrip() for line in rest]
        return "\n".join([head, *body])

    def to_json(self) -> dict[str, object]:
        """The fields of every finding, then those of the tensor, the spec with its mark, and the position, if present."""
        data: dict[str, object] = {
            "code": self.code,
            "severity": self.severity,
            "law": self.law,
            "where": self.place,
            "found": self.found,
            "needed": self.needed,
            "fix": self.fix,
            "cost": self.cost,
        }
        if self.effect is not None:
            data["effect"] = self.effect.to_json()
        if self.tried:
            data["tried"] = self.tried
        if self.tensor is not None:
            data["tensor"] = self.tensor
        if self.notation is not None and self.mark is not None:
            data["notation"] = self.notation
            data["mark"] = list(self.mark)
        if self.position is not None:
            position = self.position
            data["position"] = {"source": position.source, "line": position.line, "column": position.column}
        return data


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then information; by code, then in the order given."""
    return tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.code)))


def count_by_severity(findings: Iterable[Finding]) -> Mapping[Severity, int]:
    counts: dict[Severity, int] = dict.fromkeys(SEVERITIES, 0)
    for finding in findings:
        counts[finding.severity] += 1
    return counts

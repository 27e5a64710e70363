"""A plan, a handmade program of it that violates a law, and a similar program that does not.

The whole text of each finding is kept in a file. A new or changed text is written by
``python -m tests.golden.regenerate_findings``. Read the diff before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shardwright import make_plan
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.findings import compiled_findings
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.cost import price, read_machine
from shardwright.cost.advice import settling_on
from tests.golden.findings_case import Case, request

FOLDER = Path(__file__).parent / "compiled_findings"

Program = Callable[[Plan], CompiledProgram]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCase:
    """``layout``, ``model`` and ``options`` as a ``Case`` has them; ``chips`` is what is compiled for."""

    name: str
    layout: str
    chips: str
    program: Program
    neighbour: Program
    model: str = "llama3-test"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        return self.name.split("-")[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"


@cache
def planned(model: str, layout: str, chips: str, options: tuple[tuple[str, Any], ...]) -> Plan:
    machine = read_machine(chips)
    case = Case(
        name="", model=model, layout=layout, chips=chips, options={"chip": machine.chip, **dict(options)}, neighbour={}
    )
    plan = make_plan(request(case))
    return price(plan, machine)


def plan_of(case: CompiledCase) -> Plan:
    return planned(case.model, case.layout, case.chips, tuple(case.options.items()))


def findings_in(case: CompiledCase, program: Program) -> tuple[Finding, ...]:
    plan = plan_of(case)
    compiled = program(plan)
    return compiled_findings(plan, compiled, agree(plan, compiled), settling_on(plan, read_machine(case.chips)))


def of_its_code(case: CompiledCase, program: Program) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings_in(case, program) if finding.code == case.code)


def golden_text(case: CompiledCase) -> str:
    return "\n\n".join(finding.text() for finding in of_its_code(case, case.program)) + "\n"


def first_text(case: CompiledCase) -> str:
    """The text that its page shows."""
    return f"{of_its_code(case, case.program)[0].text()}\n"

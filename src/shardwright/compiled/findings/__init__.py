"""What there is to say of a compiled program beside its plan. Each file holds one family of checks.

experts.py    SW301: tokens should travel, and weights do
unmatched.py  SW302: what the plan does not expect, and what the program lacks
loops.py      SW303: what a loop repeats without need
sizes.py      SW304, SW305, SW306: what travels larger than it need be
products.py   SW307: products that are made more often than the plan counts
dtypes.py     SW308: a wider type than the plan's
exposed.py    SW309: what nothing is computed beside
memory.py     SW310, SW311, SW312: state held twice, scores of a vocabulary, more than the chip has
tools.py      SW313: a compiler that JAX does not ask for
fixes.py      which edit is printed as a fix
wording.py    places, bytes and times as they are written
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.findings.dtypes import dtypes
from shardwright.compiled.findings.experts import experts
from shardwright.compiled.findings.exposed import exposed
from shardwright.compiled.findings.loops import loops
from shardwright.compiled.findings.memory import chip_memory, donation, scores
from shardwright.compiled.findings.products import products
from shardwright.compiled.findings.sizes import expanded, gathered_in_full, summed_and_sliced
from shardwright.compiled.findings.tools import tools
from shardwright.compiled.findings.unmatched import unmatched
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.plan.plan import Plan

CHECKS: tuple[Callable[[Plan, CompiledProgram, Agreement], Iterator[Finding]], ...] = (
    experts,
    unmatched,
    loops,
    gathered_in_full,
    expanded,
    summed_and_sliced,
    products,
    dtypes,
    exposed,
    donation,
    scores,
    chip_memory,
    tools,
)


def compiled_findings(plan: Plan, program: CompiledProgram, agreement: Agreement) -> tuple[Finding, ...]:
    """Every finding about a compiled program, the worst first. The plan's own are not among them."""
    return worst_first(finding for check in CHECKS for finding in check(plan, program, agreement))

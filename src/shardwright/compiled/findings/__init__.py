"""The findings about a compiled program compared with its plan. Each file has one family of checks.

experts.py    SW301: weights gathered instead of tokens sent, or the reverse
unmatched.py  SW302: collectives that the plan does not expect, or that the program lacks
loops.py      SW303: collectives that a loop repeats without need
sizes.py      SW304, SW305, SW306: collectives that send more than necessary
products.py   SW307: products that are computed more often than the plan counts
dtypes.py     SW308: a wider dtype than the plan's
exposed.py    SW309: collectives without overlap
memory.py     SW310, SW311, SW312: state held twice, logits as largest temporary, more memory than the chip has
tools.py      SW313: a compiler version that JAX does not require
narrow.py     SW314: products of values where the plan multiplies codes
fixes.py      which edit is printed as a fix
wording.py    texts of places, bytes and times
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.findings.dtypes import dtypes
from shardwright.compiled.findings.experts import experts
from shardwright.compiled.findings.exposed import exposed
from shardwright.compiled.findings.fixes import Fixable, settled
from shardwright.compiled.findings.loops import loops
from shardwright.compiled.findings.memory import chip_memory, donation, scores
from shardwright.compiled.findings.narrow import narrow
from shardwright.compiled.findings.products import products
from shardwright.compiled.findings.sizes import expanded, gathered_in_full, summed_and_sliced
from shardwright.compiled.findings.tools import tools
from shardwright.compiled.findings.unmatched import unmatched
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.plan.plan import Plan
from shardwright.cost.advice import Settle, first_that_ends

Check = Callable[[Plan, CompiledProgram, Agreement], Iterator[Finding | Fixable]]

CHECKS: tuple[Check, ...] = (
    experts,
    unmatched,
    loops,
    gathered_in_full,
    expanded,
    summed_and_sliced,
    products,
    narrow,
    dtypes,
    exposed,
    donation,
    scores,
    chip_memory,
    tools,
)


def compiled_findings(
    plan: Plan,
    program: CompiledProgram,
    agreement: Agreement,
    settle: Settle = first_that_ends,
    checks: Iterable[Check] = CHECKS,
) -> tuple[Finding, ...]:
    """Every finding about a compiled program, the worst first, without the findings of the plan. ``settle``: how its fixes are chosen."""
    return worst_first(
        settled(plan, finding, settle) if isinstance(finding, Fixable) else finding
        for check in checks
        for finding in check(plan, program, agreement)
    )

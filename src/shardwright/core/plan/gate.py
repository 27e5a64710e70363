"""The one gate before anything runs: commands and engines check the findings of a plan here, before anything is allocated.

A run starts if and only if its plan has no error. What only the machine knows is checked afterwards: its devices, its
packages, the files of a run.
"""

from __future__ import annotations

from shardwright.core.findings.codes import OF_THE_CHIP
from shardwright.core.findings.errors import raise_errors
from shardwright.core.plan.plan import Plan


def require_trained(plan: Plan) -> None:
    """Check a plan before it is trained. Raises FindingsError with the plan's errors."""
    raise_errors(plan.findings)


def require_lowered(plan: Plan) -> None:
    """Check a plan before it is compiled or dry-run. Raises FindingsError with the plan's errors, except for SW312 and SW417.

    The compiler decides whether a program fits in memory; an estimate that it does not fit stops nothing. A program that multiplies values
    in place of codes has the same numbers.
    """
    raise_errors(finding for finding in plan.findings if finding.code not in OF_THE_CHIP)

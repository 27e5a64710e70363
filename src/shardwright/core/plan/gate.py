"""The one gate before anything runs: what a verb and an engine ask of a plan, before anything is allocated.

What a plan has no error of begins; what would not begin is an error of the plan. What only the machine knows comes
after: its devices, its packages, the files of a run.
"""

from __future__ import annotations

from shardwright.core.findings.codes import TOO_LARGE
from shardwright.core.findings.errors import raise_errors
from shardwright.core.plan.plan import Plan


def require_trained(plan: Plan) -> None:
    """Before a plan is trained. Raises FindingsError with its errors."""
    raise_errors(plan.findings)


def require_lowered(plan: Plan) -> None:
    """Before a plan is compiled, or walked through. Raises FindingsError with its errors, but for one.

    Whether a program fits is for its compiler to say: an estimate that it does not stops nothing.
    """
    raise_errors(finding for finding in plan.findings if finding.code != TOO_LARGE)

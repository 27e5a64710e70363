"""SW415: rows that are longer than the model's window of attention. On shorter ones a window changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import option
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def rows_beyond_the_window(plan: Plan) -> Iterator[Draft]:
    """Both engines attend to every token before."""
    window, length = plan.request.table.attention_window, plan.request.length
    if window is not None and length > window:
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where="--length",
            found=f"rows of {length:,} tokens, where each token of {plan.request.table.name} attends to the last {window:,}; "
            f"the engines have no window",
            needed=f"rows of at most {window:,} tokens, for which a window changes nothing",
        )
        yield Draft(finding=finding, candidates=(option("length", window),))

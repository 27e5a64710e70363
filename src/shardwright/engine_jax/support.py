"""What this engine does not run, said before anything is allocated."""

from __future__ import annotations

from shardwright.core.plan import Plan
from shardwright.core.unsupported import require_no_stages, require_slices


def require_support(plan: Plan) -> None:
    """Raises InputError for a plan that this engine does not lower, with what to use in its place."""
    require_no_stages(plan)
    require_slices(plan)

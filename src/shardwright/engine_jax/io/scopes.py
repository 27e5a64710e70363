"""Names that the compiler keeps: the component, and the tensor of the plan, that an operation belongs to; in a pipeline also its
phase, and how often a branch is taken, which no compiler knows.

They are part of each operation's ``op_name`` and are read from the compiled program, to compare each collective with
those that the plan lists. A scope around a function with a custom backward pass also applies to that pass. A scope
opened inside that pass comes after it in the name, and the last one of each kind counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from shardwright.core.pipeline.program import Share
from shardwright.core.plan.plan import Phase


def of_component(component: str) -> AbstractContextManager[object]:
    """Operations of a component of the model."""
    return jax.named_scope(f"component={component}")


def of_tensor(tensor: str) -> AbstractContextManager[object]:
    """Operations that move a tensor of the plan."""
    return jax.named_scope(f"tensor={tensor}")


def of_phase(phase: Phase) -> AbstractContextManager[object]:
    """Operations of a phase, where differentiation does not name it. What is transposed inside is of the backward pass."""
    return jax.named_scope(f"phase={phase}")


def of_branch(share: Share) -> AbstractContextManager[object]:
    """A branch that the slowest rank takes as often as ``share`` says."""
    return jax.named_scope(f"taken={share.taken}of{share.turns}")

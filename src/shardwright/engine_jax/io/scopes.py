"""Names that the compiler carries along: the component, and the tensor of the plan, that an operation belongs to.

They stand in each operation's ``op_name`` and are read back out of the compiled program, so that a collective can be held
against the one that the plan lists. A scope around a function with a backward pass of its own is also its backward
pass's; one opened inside that pass stands behind it, and the last of each kind counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax


def of_component(component: str) -> AbstractContextManager[object]:
    """Operations of a component of the model."""
    return jax.named_scope(f"component={component}")


def of_tensor(tensor: str) -> AbstractContextManager[object]:
    """Operations that move a tensor of the plan."""
    return jax.named_scope(f"tensor={tensor}")

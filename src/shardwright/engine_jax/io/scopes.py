"""Names that the compiler keeps: the component, and the tensor of the plan, that an operation belongs to.

They are part of each operation's ``op_name`` and are read from the compiled program, to compare each collective with
those that the plan lists. A scope around a function with a custom backward pass also applies to that pass. A scope
opened inside that pass comes after it in the name, and the last one of each kind counts.
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

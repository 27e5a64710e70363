"""Which of the weights that a run begins with come from elsewhere, by the tensors' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEW, SKIP, CAST = "--weights-new", "--weights-skip", "--weights-cast"
SHOWN_BY_TENSORS = ("architecture.vocab", "architecture.tied")
"""Values of an architecture that may differ where tensors are named as new or left out: shapes and names then show whether
all tensors are named that they concern. No shape shows the others."""

OFFER = f"On request: {NEW} PATTERN begins tensors from initial values; {SKIP} PATTERN leaves tensors out."
"""For an error about such values alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialWeights:
    """``new``: names of the model's weights that begin from initial values, whatever the source has. ``skip``: patterns of names
    in the source that are left out. ``cast``: floating dtypes may differ.
    """

    new: frozenset[str] = frozenset()
    skip: Sequence[str] = ()
    cast: bool = False

    @property
    def permitted(self) -> tuple[str, ...]:
        """The keys of an architecture that may differ."""
        return SHOWN_BY_TENSORS if self.new or self.skip else ()


ALL_WEIGHTS = PartialWeights()

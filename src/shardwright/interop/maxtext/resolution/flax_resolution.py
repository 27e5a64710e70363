"""What an ordered list of rules makes of one tensor, in each of Flax's two dialects.

**Linen** (``flax.linen.logical_to_mesh_axes``) walks down the list. A line is obeyed when the tensor has a dim of its
name, that dim has no line yet, and none of the line's axes cuts another dim; then the dim gets all of its axes. Else the
line does nothing. A line without axes is obeyed too: it ends the search for its dim.

**NNX** (``flax.core.spmd.apply_rules``) makes a dictionary of the list, so that the last line of a name is the one that
counts, and never asks whether an axis is taken. A name without a line passes through, as if it were a mesh axis.

MaxText reads weights the first way, on its Linen path and, since its #4205, on its NNX path.

Neither knows the sizes of the mesh: a clash over an axis of size 1 is a clash. Both are held against Flax by a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.findings.errors import InputError
from shardwright.interop.maxtext.reading.rules import Rule, Rules

Names = Sequence[str | None]
"""The logical name of each dim; None for a dim that is never cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A line whose dim was free and that was passed over: ``taken`` says which dim has each of its axes that was taken."""

    rule: Rule
    dim: int
    taken: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """For each dim the line it obeys, or None; and every line that was passed over for an axis."""

    names: tuple[str | None, ...]
    obeyed: tuple[Rule | None, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dim, major first, those of size 1 among them."""
        return tuple(line.axes if line else () for line in self.obeyed)


def resolve(names: Names, rules: Rules) -> Resolution:
    """Under Linen. Raises InputError for a name that stands twice in one tensor, as Flax does.

    >>> from shardwright.interop.maxtext.reading.rules import rule
    >>> rules = [rule("batch", "data", "expert"), rule("experts", "expert")]
    >>> found = resolve(["experts", "batch"], rules)
    >>> found.axes, dict(found.refused[0].taken)
    (((), ('data', 'expert')), {'expert': 1})
    """
    tensor = tuple(names)
    twice = next((name for name in tensor if name is not None and tensor.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"logical name '{twice}' stands twice in one tensor: {', '.join(map(str, tensor))}.")
    obeyed: list[Rule | None] = [None] * len(tensor)
    owner: dict[str, int] = {}
    refused: list[Refused] = []
    for line in rules:
        if line.name not in tensor:
            continue
        dim = tensor.index(line.name)
        if obeyed[dim] is not None:
            continue
        taken = {axis: owner[axis] for axis in line.axes if axis in owner}
        if taken:
            refused.append(Refused(rule=line, dim=dim, taken=taken))
        else:
            obeyed[dim] = line
            owner.update(dict.fromkeys(line.axes, dim))
    return Resolution(names=tensor, obeyed=tuple(obeyed), refused=tuple(refused))


def resolve_nnx(names: Names, rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Under NNX: the axes of each dim, where an axis may stand twice and a name without a line stands for itself.

    >>> from shardwright.interop.maxtext.reading.rules import rule
    >>> resolve_nnx(["embed", "mlp"], [rule("embed", "fsdp"), rule("mlp", "tensor"), rule("embed", "tensor")])
    (('tensor',), ('tensor',))
    """
    last = {line.name: line.axes for line in rules}
    return tuple(() if name is None else last.get(name, (name,)) for name in names)

"""An ordered list of rules applied to one tensor, in each of Flax's two dialects.

**Linen** (``flax.linen.logical_to_mesh_axes``) goes through the list in order. A rule applies when the tensor has a dim of its
name, no rule applies to that dim yet, and none of the rule's axes shards another dim. Then the dim gets all of its axes.
Otherwise the rule is skipped. A rule without axes applies too: it ends the search for its dim.

**NNX** (``flax.core.spmd.apply_rules``) makes a dictionary of the list. So the last rule of a name counts, and an axis may be
used twice. A name without a rule passes through, as if it were a mesh axis.

MaxText resolves weights as Linen does, on its Linen path and, since its #4205, on its NNX path.

Neither dialect knows the sizes of the mesh: a conflict over an axis of size 1 is a conflict. A test compares both with Flax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.findings.errors import InputError
from shardwright.interop.maxtext.reading.rules import Rule, Rules

Names = Sequence[str | None]
"""The logical name of each dim; None for a dim that is never sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRule:
    """A rule for an unsharded dim that was skipped. ``taken``: for each of its axes that was taken, the dim that has it."""

    rule: Rule
    dim: int
    taken: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """For each dim the rule that applies to it, or None; and every rule that was skipped for a taken axis."""

    names: tuple[str | None, ...]
    applied: tuple[Rule | None, ...]
    skipped: tuple[SkippedRule, ...] = ()

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dim, major first, including those of size 1."""
        return tuple(line.axes if line else () for line in self.applied)


def resolve(names: Names, rules: Rules) -> Resolution:
    """Under Linen. Raises InputError for a name that is twice in one tensor, as Flax does.

    >>> from shardwright.interop.maxtext.reading.rules import rule
    >>> rules = [rule("batch", "data", "expert"), rule("experts", "expert")]
    >>> found = resolve(["experts", "batch"], rules)
    >>> found.axes, dict(found.skipped[0].taken)
    (((), ('data', 'expert')), {'expert': 1})
    """
    tensor = tuple(names)
    twice = next((name for name in tensor if name is not None and tensor.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"logical name '{twice}' is twice in one tensor: {', '.join(map(str, tensor))}.")
    applied: list[Rule | None] = [None] * len(tensor)
    owner: dict[str, int] = {}
    skipped: list[SkippedRule] = []
    for line in rules:
        if line.name not in tensor:
            continue
        dim = tensor.index(line.name)
        if applied[dim] is not None:
            continue
        taken = {axis: owner[axis] for axis in line.axes if axis in owner}
        if taken:
            skipped.append(SkippedRule(rule=line, dim=dim, taken=taken))
        else:
            applied[dim] = line
            owner.update(dict.fromkeys(line.axes, dim))
    return Resolution(names=tensor, applied=tuple(applied), skipped=tuple(skipped))


def resolve_nnx(names: Names, rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Under NNX: the axes of each dim. An axis may be there twice, and a name without a rule is its own axis.

    >>> from shardwright.interop.maxtext.reading.rules import rule
    >>> resolve_nnx(["embed", "mlp"], [rule("embed", "fsdp"), rule("mlp", "tensor"), rule("embed", "tensor")])
    (('tensor',), ('tensor',))
    """
    last = {line.name: line.axes for line in rules}
    return tuple(() if name is None else last.get(name, (name,)) for name in names)

"""How each weight's gradient is reduced over each axis: derived from what is contracted, never configured.

| the axis cuts what is contracted in making the gradient | the axis cuts the weight at rest | reduction |
|---|---|---|
| yes | yes | reduce-scatter |
| yes | no | all-reduce, over replicas once per step |
| no | either | none |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shardwright.core.layout import Layout
from shardwright.core.spec import Spec
from shardwright.core.table import Contraction, Weight

Reduction = Literal["reduce-scatter", "all-reduce"]


def partial_axes(layout: Layout, contracted: tuple[Contraction, ...]) -> tuple[str, ...]:
    """The axes over which a tensor is partial that was made by summing over the given dims, in mesh order."""
    return tuple(
        axis for axis in layout.entries if any(name in layout.cut_by(axis, component) for component, name in contracted)
    )


def gradient_reductions(weight: Weight, layout: Layout, at_rest: Spec) -> Mapping[str, Reduction]:
    """The reduction of a weight's gradient over each axis that needs one; none for a frozen weight."""
    if weight.frozen:
        return {}
    return {
        axis: "reduce-scatter" if axis in at_rest.axes else "all-reduce"
        for axis in partial_axes(layout, weight.contracted)
    }

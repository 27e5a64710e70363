"""One layer, and the two ends, from their operations and weights.

B rows, L tokens, M embed, V vocabulary. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.core.policies.runs import Run
from shardwright.core.program.program import WeightUse
from shardwright.core.program.walk import Operation, Walk, steps_of
from shardwright.engine_torch.experts.experts import MoeCounts
from shardwright.engine_torch.io.layer_io import InUse, Links, LowPrecision, Site
from shardwright.engine_torch.model.interpreter import Calls, Now


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOfStage:
    """What of a layer is the same in all steps. ``number``: in its stack; ``index``: among the stage's layers of that stack.

    ``calls``: from its input to its output; ``names``: from the table's to those within a layer; ``name_of``: from keys of its weights to the
    table's names; ``low``: of its products, by the table's names; ``policy``: what it keeps for the backward pass.
    """

    stack: str
    number: int
    index: int
    calls: Calls
    names: Mapping[str, str]
    name_of: Mapping[str, str]
    low: Mapping[str, LowPrecision]
    policy: Run


def layer(
    x_BLM: torch.Tensor, params: InUse, at: LayerOfStage, prepared: Sequence[Any], links: Links, site: Site
) -> tuple[torch.Tensor, MoeCounts | None]:
    """One layer's output, BLM, and its counts. ``params``: its weights by the table's names, gathered; ``prepared``: of the batch; ``site``: of
    its products."""
    now = Now(
        weights={at.names[name]: links.use(name, weight) for name, weight in params.items()},
        low={at.names[name]: replace(low, site=site) for name, low in at.low.items()},
        prepared=prepared,
    )
    (output_BLM,) = at.calls(now, x_BLM)
    return output_BLM, now.counts


class Ends:
    """Both ends of a model, of which a stage may have one. ``params``: the weights of ends, by name, gathered."""

    def __init__(self, walk: Walk, links: Links) -> None:
        self._links, self._fields = links, [*walk.fields]
        self._before, self._after = _uses(walk.before), _uses(walk.after)
        loss, fields = steps_of(walk.after[-1])[-1], walk.fields.values()
        self._embedding = Calls(walk, walk.before, [*fields], [walk.input], links)
        self._logits = Calls(walk, walk.after, [*fields, walk.output], [loss.inputs[0], loss.output], links)

    def embedded(self, batch: Mapping[str, torch.Tensor], params: InUse) -> torch.Tensor:
        """The residual stream before the first layer."""
        (x_BLM,) = self._embedding(Now(weights=self._in_use(self._before, params), low={}), *self._given(batch))
        return x_BLM

    def scored(
        self, batch: Mapping[str, torch.Tensor], x_BLM: torch.Tensor, params: InUse, site: Site
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The logits of all tokens, if they are computed at one time, and the loss summed over a rank's valid tokens. ``x_BLM``: of the last
        layer; ``site``: of the product of the logits."""
        low = {
            use.name: replace(self._links.low[use.name], site=site)
            for use in self._after
            if use.name in self._links.low
        }
        logits_BLV, loss = self._logits(
            Now(weights=self._in_use(self._after, params), low=low), *self._given(batch), x_BLM
        )
        return logits_BLV, loss

    def _in_use(self, uses: Sequence[WeightUse], params: InUse) -> InUse:
        return {use.name: self._links.use(use.name, params[use.name], use.component) for use in uses}

    def _given(self, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        return [batch.get(name) for name in self._fields]


def _uses(operations: Sequence[Operation]) -> list[WeightUse]:
    return [use for operation in operations for step in steps_of(operation) for use in step.weights]

"""The forward pass of one layer of any model, from its table.

B rows, L tokens, M embed. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardwright.core.policies.runs import Run
from shardwright.engine_torch.attention.attention import attention
from shardwright.engine_torch.attention.scores import AttentionMask
from shardwright.engine_torch.experts.moe import MoeCounts, experts_layer
from shardwright.engine_torch.io.layer_io import InUse, Links, Site
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.layers.mlp import feed_forward
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.layers.rotary import Angles
from shardwright.models.layers.decoder import AFTER_ATTENTION
from shardwright.models.parts.architecture import Architecture, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOfStage:
    """What of a layer is the same in all steps. ``number``: in its stack; ``index``: among the stage's layers of that stack.

    ``names``: from the table's to those within a layer; ``name_of``: from keys of its weights to the table's names; ``policy``: what it
    keeps for the backward pass.
    """

    stack: Stack
    number: int
    index: int
    names: Mapping[str, str]
    name_of: Mapping[str, str]
    links: Links
    policy: Run


def layer(
    x_BLM: torch.Tensor,
    valid_BL: torch.Tensor | None,
    params: InUse,
    at: LayerOfStage,
    architecture: Architecture,
    rotation: Angles,
    mask: AttentionMask,
    site: Site,
) -> tuple[torch.Tensor, MoeCounts | None]:
    """One layer's output, BLM, and its counts. ``params``: its weights by the table's names, gathered; ``valid_BL``: tokens that are not
    padding, for a layer with experts; ``site``: of its products."""
    names, links = at.names, at.links
    weights = {names[name]: links.use(name, weight) for name, weight in params.items()}
    if links.low:
        low = {names[name]: replace(links.low[name], site=site) for name in names if name in links.low}
        links = replace(links, low=low)
    eps = architecture.norm_eps
    normed_BLM = rms_norm(x_BLM, weights["residual.attention_norm"], eps, split=links.split)
    x_BLM = named(x_BLM + attention(normed_BLM, weights, architecture, rotation, mask, links), AFTER_ATTENTION)
    normed_BLM = rms_norm(x_BLM, weights["residual.feed_forward_norm"], eps, split=links.split)
    if not at.stack.experts:
        return x_BLM + feed_forward(normed_BLM, weights, "mlp", links), None
    assert architecture.experts is not None
    assert valid_BL is not None
    added_BLM, counts = experts_layer(normed_BLM, valid_BL, weights, architecture.experts, links)
    if architecture.experts.shared_width:
        added_BLM = added_BLM + feed_forward(normed_BLM, weights, "shared", links)
    return x_BLM + added_BLM, counts

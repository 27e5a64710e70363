"""A rank's rows and tokens of a step, as the plan shards them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.plan.plan import Plan
from shardwright.models.layers.decoder import walk_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """``offsets``: the rows of a step that the rank reads, ascending; ``tokens``: its shard of a row."""

    offsets: tuple[int, ...]
    tokens: slice
    device: torch.device

    def on_device(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The fields of the rank's tokens, BL; ``arrays`` have the rank's rows with all their tokens."""
        return {
            name: torch.from_numpy(np.ascontiguousarray(array[:, self.tokens])).to(self.device)
            for name, array in arrays.items()
        }


def feed_of(plan: Plan, rank: int, device: torch.device) -> Feed:
    """The feed of a rank in a run of ``plan``."""
    shape = (plan.request.batch, plan.request.length)
    box = shard_box(
        plan.by_name[walk_of(plan.request.table.architecture).fields["tokens"].row].in_use, plan.mesh, shape, rank
    )
    assert box is not None, (shape, rank)
    rows, tokens = zip(box.start, box.stop, strict=True)
    return Feed(offsets=tuple(range(*rows)), tokens=slice(*tokens), device=device)

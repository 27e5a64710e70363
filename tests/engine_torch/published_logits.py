"""The logits of a checkpoint on ranks. No JAX is loaded here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwright.checkpoint import open_newest
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.state import load_state
from tests.engine_torch.training import CPU, model_of


def rank_logits(plan: Plan, out: Path, batch: dict[str, np.ndarray]) -> tuple[Box | None, np.ndarray]:
    """This rank's box of the logits of a batch, by the weights of the newest checkpoint under ``out``."""
    model = model_of(plan)
    load_state(model, open_newest(out), weights_only=True)
    feed = feed_of(plan, dist.get_rank(), CPU)
    own = feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()})
    with torch.no_grad():
        logits_BLV = model(own).logits_BLV.numpy()
    spec = plan.by_name["logits.scores"].in_use
    shape = (*batch["tokens"].shape, plan.request.table.sizes["vocab"])
    return shard_box(spec, plan.mesh, shape, dist.get_rank()), logits_BLV

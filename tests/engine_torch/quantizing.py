"""What a rank does to show what it quantizes: steps of a marked plan (``tests/sameness/codes.py``). No JAX is loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.state import initial_state
from shardwright.engine_torch.training.step import train_step
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_torch.training import CPU, model_of
from tests.sameness.codes import Piece, Place, matrices, recording

Pieces = Mapping[Place, Sequence[Piece]]


def quantized_by(
    plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[Mapping[str, np.ndarray]]
) -> list[Pieces]:
    """All that this rank quantizes, step by step. Rows of batches are in the plan's order."""
    model = model_of(plan)
    state = initial_state(model, seed)
    feed, step = feed_of(plan, dist.get_rank(), CPU), train_step(plan, options)
    found: list[Pieces] = []
    for batch in batches:
        pieces: dict[Place, list[Piece]] = {}

        def record(place: Place, contracted_dims: int, *arrays: torch.Tensor, into=pieces) -> None:
            by_dims = (matrices(place, array.detach().clone().numpy(), contracted_dims) for array in arrays)
            into.setdefault(place, []).extend(Piece(*one) for one in zip(*by_dims, strict=True))

        with recording(ARRAYS, record):
            step(state, feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()}))
        found.append(pieces)
    return found

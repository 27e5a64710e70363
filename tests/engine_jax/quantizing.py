"""What the simulated devices of a step of JAX quantize: steps of a marked plan (``tests/sameness/codes.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.training.state import State, initial_state
from shardwright.engine_jax.training.step import batch_sharding
from tests.engine_jax.steps import compile_plan
from tests.sameness.codes import Piece, Place, Recorded, matrices, recording


def quantized_by_devices(plan: Plan, seed: int, batches: Sequence[Mapping[str, np.ndarray]]) -> list[Recorded]:
    """All that each device quantizes, step by step. Rows of batches are in the plan's order."""
    now: list[dict[Place, list[Piece]]] = []

    def put(place: Place, contracted_dims: int, device: Any, *arrays: Any) -> None:
        by_dims = (matrices(place, np.array(array), contracted_dims) for array in arrays)
        now[int(device)].setdefault(place, []).extend(Piece(*one) for one in zip(*by_dims, strict=True))

    def record(place: Place, contracted_dims: int, *arrays: Any) -> None:
        device = jax.lax.axis_index(plan.mesh.names)
        jax.debug.callback(partial(put, place, contracted_dims), device, *arrays)

    with recording(ARRAYS, record):
        # A fusion computes its operands anew, with other last bits than those that are recorded: of thousands one is another code.
        step = compile_plan(plan, xla_disable_hlo_passes="fusion")
    mesh = device_mesh(plan.mesh)
    state: State = initial_state(plan, mesh, seed)
    found: list[Recorded] = []
    for batch in batches:
        now[:] = [{} for _ in range(plan.mesh.num_devices)]
        placed = {name: jax.device_put(array, batch_sharding(plan, mesh)) for name, array in batch.items()}
        state, metrics = step(state, placed)
        jax.block_until_ready(metrics)
        jax.effects_barrier()
        found.append(list(now))
    return found

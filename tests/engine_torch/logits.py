"""Logits of a model on one rank, to compare with those of another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.training.state import make_state
from shardwright.layouts import load_layout
from tests.models.published import one_document


def plan_of_one_rank(table: ModelTable, rows: int, length: int, dtype: str = "float32") -> Plan:
    """One rank has all weights, and keeps what it computes."""
    return make_plan(
        Request(
            layout=load_layout("fsdp"),
            table=table,
            batch=rows,
            length=length,
            mesh_sizes={"fsdp": 1},
            engine="torch",
            remat="none",
            dtype=dtype,
        )
    )


def our_logits(plan: Plan, weights: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Logits of rows, by weights under the names of the table. In a process group of this process alone."""
    rows, length = batch["tokens"].shape
    ranks = ranks_of(plan, torch.device("cpu"))
    model = Model(plan, ranks)

    def read(name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        given = [weights[name][box.slices] if name in weights else np.zeros(box.shape, np.float32) for box in boxes]
        return [torch.from_numpy(np.ascontiguousarray(one)) for one in given]

    make_state(model, read, 0)
    fields = {**one_document((rows, length)), "targets": batch["tokens"], **batch}
    arrays = {name: torch.from_numpy(np.ascontiguousarray(array, np.int32)) for name, array in fields.items()}
    with torch.no_grad():
        logits_BLV = model({**arrays, "valid": torch.ones((rows, length), dtype=torch.bool)}).logits_BLV
    assert logits_BLV is not None
    return logits_BLV.numpy()

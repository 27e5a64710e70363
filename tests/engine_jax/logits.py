"""Logits of a model on one device, to compare with those of another program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.core.model.table import ModelTable
from shardwright.core.policies.runs import runs_of
from shardwright.engine_jax.model.forward import forward
from tests.engine_jax.one_device import one_device_links
from tests.models.published import one_document


def our_logits(table: ModelTable, weights: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of rows, by weights under the names of the table."""
    params = {name: jnp.asarray(array) for name, array in weights.items()}
    fields = {**one_document(batch["tokens"].shape), **batch}
    arrays = {name: jnp.asarray(array, jnp.int32) for name, array in fields.items()}
    rows, length = batch["tokens"].shape
    links = one_device_links(table, batch=rows, length=length)
    compiled = jax.jit(lambda p, b: forward(p, b, table, links, runs=runs_of(table, "none")).logits_BLV)
    return np.asarray(compiled(params, arrays))

"""Random weights that reveal any mix-up: no norm is one, no bias is zero, and no two weights are equal."""

from __future__ import annotations

import numpy as np

from shardwright.core.model.table import ModelTable, Weight

NEAR = {"normal": (0.0, 0.08), "ones": (1.0, 0.2), "zeros": (0.0, 0.3)}
"""Mean and standard deviation for each kind of initialiser."""


def random_weights(table: ModelTable, seed: int = 0) -> dict[str, np.ndarray]:
    """Every weight of a table, layers of a stack along dim 0."""
    rng = np.random.default_rng(seed)
    return {weight.name: _random(weight, rng) for weight in table.weights}


def _random(weight: Weight, rng: np.random.Generator) -> np.ndarray:
    shape = (weight.num, *weight.shape) if weight.stack else weight.shape
    mean, stddev = NEAR[weight.initializer.kind]
    return rng.normal(mean, stddev, shape).astype(np.float32)

"""Main weights of modules whose weights rest as codes: what an optimizer updates, and what codes follow from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.engine_torch.modules.codes.quantizing import quantize_together
from shardwright.engine_torch.modules.codes.state import RestingState


@torch.no_grad()
def keep_main_weights(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Give each weight inside of ``module`` that rests as codes a main weight, float32, with the placement of the weight.

    Its elements are the initial ones before they were quantized, where ``preserve_high_precision_init_val`` was asked for, and else the values
    of the codes. ``optimizer``: any of ``torch.optim``, of the module's parameters: after each of its steps all codes are made of the main weights, and
    their amaxes are reduced together. Without it codes are made of main weights that have changed when they are next used.

    Called once, after ``reset_parameters`` and before a load. Raises InputError for a weight that is in high precision still.
    """
    resting = [state for state in module.modules() if isinstance(state, RestingState)]
    for state in resting:
        for name in state.names if state.is_wanted else ():
            held = state.held(name)
            if held is not None and held.main is None:
                initial, held.initial = held.initial, None
                held.main = initial if initial is not None else held.values(state.shape(name)).contiguous()
                held.settle(state.parameter(name))

    def quantize(*_: Any) -> None:
        weights = [weight for state in resting for weight in state.to_quantize()]
        quantize_together([weight for weight in weights if weight.held.is_stale(weight.parameter)])

    if optimizer is not None:
        optimizer.register_step_post_hook(quantize)

"""Constructor arguments of Transformer Engine that have no meaning here: accepted with its default, else refused with what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.engine_torch.modules.parts.initial import Parameter

_OVERLAP = "Communication is not overlapped by the module"
_SAVED = "Leave it out: gradients are accumulated by autograd, which fully_shard reduces"

UNUSED: Mapping[str, tuple[Any, str]] = {
    "fuse_wgrad_accumulation": (False, _SAVED),
    "delay_wgrad_compute": (False, _SAVED),
    "get_rng_state_tracker": (None, "Leave it out: initial values are a function of seed and element on any mesh"),
    "rng_tracker_name": (None, "Leave it out: initial values are a function of seed and element on any mesh"),
    "return_bias": (False, "Give bias=False, and add a bias of your own"),
    "parameters_split": (None, "Make a Linear for each part, so that tensor parallelism shards each by itself"),
    "return_layernorm_output_gathered": (
        False,
        "Give return_layernorm_output, and gather it: each rank has its shard of the tokens",
    ),
    "save_original_input": (False, "Leave it out: the input is saved as it is"),
    "symmetric_ar_type": (None, _OVERLAP),
    "ub_name": (None, _OVERLAP),
    "ub_overlap_ag": (False, _OVERLAP),
    "ub_overlap_rs": (False, _OVERLAP),
    "ub_overlap_rs_dgrad": (False, _OVERLAP),
    "ub_overlap_ag_fprop": (False, _OVERLAP),
    "ub_overlap_rs_fprop": (False, _OVERLAP),
    "ub_overlap_ag_dgrad": (False, _OVERLAP),
    "ub_bulk_dgrad": (False, _OVERLAP),
    "ub_bulk_wgrad": (False, _OVERLAP),
    "fp8_output": (False, "Outputs are in high precision"),
    "fp8_grad": (False, "Gradients are in high precision"),
    "out": (None, "Leave it out: the output is a new tensor"),
    "dgrad_out": (None, "Leave it out: the gradient is a new tensor"),
    "use_grouped_tensor": (None, "Leave it out: each of num_gemms has a weight of its own"),
    "ub_tp_comm_overlap": (False, _OVERLAP),
    "drop_path_rate": (0.0, "No path is dropped here"),
    "seq_length": (None, "Leave it out: any number of tokens is accepted"),
    "micro_batch_size": (None, "Leave it out: any number of tokens is accepted"),
    "checkpoint": (False, "Use torch.utils.checkpoint"),
    "save_for_backward_fp8": (False, "Leave it out"),
    "single_grouped_weight": (False, "Leave it out: each of num_gemms has a weight of its own"),
    "single_grouped_bias": (False, "Leave it out: each of num_gemms has a bias of its own"),
    "layer_number": (None, "Leave it out"),
    "return_max_logit": (False, "Leave it out"),
    "softmax_type": ("vanilla", "Only the ordinary softmax is computed"),
}
"""By name: Transformer Engine's default, and what to do instead."""


def refuse(module: str, others: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Raises InputError for an argument that a module does not have, or has only by its default."""
    for name, value in others.items():
        if name not in UNUSED:
            names = [name for name in dict.fromkeys(known) if name not in ("self", "others", "options", "parameters")]
            raise InputError(f"{module} has no argument '{name}'. {did_you_mean(name, names)}".rstrip())
        default, instead = UNUSED[name]
        if value is not default and value != default:
            raise InputError(f"{module}: {name}={value!r} is Transformer Engine's, and is not done here. {instead}.")


def require_positive(label: str, name: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InputError(f"{label}: {name} is {number!r}; it must be a whole number from 1.")
    return number


def multiples_near(size: int, unit: int) -> str:
    """The sizes that would do where a unit must divide one.

    >>> multiples_near(13, 2)
    '12 or 14'
    """
    below = size // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def require_sizes(parameter: Parameter, label: str) -> None:
    """Raises InputError for a parameter with a size that no tensor has."""
    for dim, size in enumerate(parameter.shape):
        require_positive(label, f"dim {dim} of '{parameter.name}' {parameter.shape}", size)


def require_wide(dtype: object, label: str) -> torch.dtype:
    """Raises InputError for a dtype that parameters cannot have: a code without its scale is no parameter."""
    wide = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if dtype not in wide:
        raise InputError(
            f"{label}: params_dtype is {dtype!r}; it must be one of {', '.join(map(str, wide))}. Weights are quantized when they are "
            f"multiplied, as recipe says."
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def require_local(x: object, label: str) -> None:
    """Raises InputError for a DTensor: the modules compute with the tensor of a rank."""
    if isinstance(x, DTensor):
        raise InputError(
            f"{label}: its input is a DTensor {tuple(x.shape)} of {', '.join(map(str, x.placements))}; it must be this rank's tensor, as "
            f"parallel_mode and sequence_parallel have it. Give x.to_local(), and use DTensor.from_local of the output."
        )


def require_floats(x: torch.Tensor, label: str) -> None:
    """Raises InputError for tokens that are no floats: a weight in their dtype would be zeros."""
    require_local(x, label)
    if not x.is_floating_point() or x.element_size() < 2:
        raise InputError(f"{label}: its input is {x.dtype}; it must be floats, as bfloat16. Cast it.")

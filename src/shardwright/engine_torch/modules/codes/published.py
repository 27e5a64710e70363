"""Weights in the published form: codes in ``float8_e4m3fn``, and under the weight's name with ``_scale_inv`` the float32 scale of each
block of 128 x 128. A value is its code times the scale of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.formats import E4M3
from shardwright.core.recipes.recipe import Block
from shardwright.engine_torch.modules.codes.coded_weight import Held
from shardwright.engine_torch.modules.codes.quantizing import as_placed
from shardwright.engine_torch.modules.codes.state import RestingState
from shardwright.engine_torch.own_program.shards import boxes_of, shards_of

SCALES = "_scale_inv"
PUBLISHED_BLOCK = Block(contracted=128, other=128)


def published_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights inside of ``module`` that rest as codes, by their published names, with the placement and in the memory that they have.

    Raises InputError for a recipe whose codes have no published form, as all but ``fp8-block``.
    """
    return {key: array for name, resting in _resting(module) for key, array in _published(name, resting).items()}


@torch.no_grad()
def load_published_weights(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take the weights that rest as codes from published ones, each the entire tensor, of which a rank takes its shards. Main weights become the
    values of the codes. Other names are left to ``load_state_dict(strict=False)``.

    Raises InputError, with nothing taken, for a weight that is missing or has another shape or dtype.
    """
    wanted = published_weights(module)
    for name, array in wanted.items():
        theirs = tensors.get(name)
        if theirs is None or (theirs.shape, theirs.dtype) != (array.shape, array.dtype):
            label = "missing" if theirs is None else f"{tuple(theirs.shape)} in {theirs.dtype}"
            raise InputError(f"'{name}' is {label}; it must be {tuple(array.shape)} in {array.dtype}.")
    for name, array in wanted.items():
        shards = shards_of(name, array)
        for shard in boxes_of(shards):
            shards.local[shard.local.slices].copy_(tensors[name][shard.box.slices])
    for _, resting in _resting(module):
        resting.take_codes()


def _resting(module: nn.Module) -> Iterator[tuple[str, RestingState]]:
    for name, child in module.named_modules():
        if isinstance(child, RestingState) and any(True for _ in child.weights()):
            yield name.rpartition(".")[0], child


def _published(owner: str, resting: RestingState) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter, held in resting.weights():
        _require_published(held)
        key = f"{owner}.{name}" if owner else name
        for array, suffix in enumerate(("", SCALES)):
            tensors[key + suffix] = as_placed(held.arrays[0][array], parameter, held.copies[0], array)
    return tensors


def _require_published(held: Held) -> None:
    quantizer = held.copies[0].quantizer
    if len(held.copies) > 1 or (quantizer.dtype, quantizer.block, quantizer.scale.dtype) != (
        E4M3,
        PUBLISHED_BLOCK,
        "float32",
    ):
        raise InputError(
            f"{held.label} rests as codes of {quantizer.dtype} in blocks of {quantizer.block.text}, and the published form has float8_e4m3fn in "
            f"blocks of 128 x 128 with float32 scales. Use the recipe fp8-block."
        )

"""What ranks do with attention under context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.engine_torch.attention_cases import (
    arguments,
    drawn_case,
    expected,
    joined,
    largest_difference,
    module_of,
    on_rank,
    tensors,
)

UNMASKED = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


def differences(seeds: Sequence[int], communication: str) -> list[float]:
    """For each drawn call, how far this rank's output and gradients are from one process's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for seed in seeds:
        case = drawn_case(seed, size, UNMASKED)
        q, k, v, cotangent, _ = tensors(case)
        entire = [[x.clone().requires_grad_() for x in side] for side in (q, k, v)]
        needed = expected(case, entire[0], entire[1], entire[2], None)
        total = sum((out * of_out).sum() for out, of_out in zip(needed, cotangent, strict=True))
        assert isinstance(total, torch.Tensor)
        every = [x for side in entire for x in side]
        gradients = torch.autograd.grad(total, every, allow_unused=True)
        gradients = [torch.zeros_like(x) if one is None else one for one, x in zip(gradients, every, strict=True)]

        leaves = [[x.clone().requires_grad_() for x in on_rank(side, rank, size)] for side in (q, k, v)]
        module = module_of(case)
        module.set_context_parallel_group(dist.group.WORLD, list(range(size)), None, communication)
        out = module(*(joined(case.layout, side) for side in leaves), **arguments(case, None))
        own = joined(case.layout, on_rank(needed, rank, size)).flatten(-2).detach()
        mine = [x for side in leaves for x in side]
        of_own = joined(case.layout, on_rank(cotangent, rank, size)).flatten(-2)
        backward = torch.autograd.grad(out, mine, of_own)
        found.append(largest_difference([out.detach(), *backward], [own, *on_rank(gradients, rank, size)]))
    return found

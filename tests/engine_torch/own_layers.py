"""What ranks do with layers of a transformer under tensor, sequence and context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.engine_torch.attention_cases import Heads, joined, largest_difference, on_rank
from tests.engine_torch.layer_cases import LayerCase, call, drawn_layer, inputs, layer_of, plain, spread

BOUND, MORE = 1e-5, 4
"""Relative to the largest value, and to how far plain PyTorch in float32 is from float64: norms of four elements divide by little."""


VANISHING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """``communication``: of context parallelism, over ``context`` ranks."""

    tp: int = 1
    sequence: bool = False
    context: int = 1
    communication: str = "p2p"

    def __str__(self) -> str:
        return f"tp {self.tp}{' sp' if self.sequence else ''} cp {self.context} {self.communication}"


def differences_of_layers(seeds: Sequence[int], parallel: Parallel) -> list[float]:
    """For each drawn layer, how far this rank's output, the gradient of its input and the entire gradients of weights are from plain PyTorch, as a
    share of the bound."""
    mesh = init_device_mesh("cpu", (parallel.context, parallel.tp), mesh_dim_names=("cp", "tp"))
    return [_difference(seed, parallel, mesh) for seed in seeds]


def alone(seed: int, **options: Any) -> float:
    return _difference(seed, Parallel(), None, **options)


def _difference(seed: int, parallel: Parallel, mesh: Any, **options: Any) -> float:
    case = drawn_layer(seed, context=parallel.context, tp=parallel.tp)
    torch.manual_seed(seed)
    entire = layer_of(case)
    spread(entire)
    own, encoder = inputs(case)
    weights = {name: one.detach() for name, one in entire.named_parameters()}
    needed, of_own, of_weights, cotangent = _plain(case, weights, own, encoder, torch.float32)
    exact = _plain(case, weights, own, encoder, torch.float64)
    of_plain = largest_difference([*needed, *of_own, *of_weights.values()], [*exact[0], *exact[1], *exact[2].values()])

    layer = entire
    if parallel.tp * parallel.context > 1:
        torch.manual_seed(seed)
        layer = layer_of(case, set_parallel_mode=True, sequence_parallel=parallel.sequence, tp_size=parallel.tp)
        spread(layer) if parallel.tp == 1 else layer.set_device_mesh(mesh["tp"])
        if parallel.tp > 1:
            for name, one in layer.named_parameters():
                assert isinstance(one, DTensor)
                _set_local(one, weights[name])
        if parallel.context > 1:
            group = mesh.get_group("cp")
            ranks = dist.get_process_group_ranks(group)
            layer.set_context_parallel_group(group, ranks, None, parallel.communication)

    def shard(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        found: Heads = list(parts)
        if parallel.context > 1:
            found = on_rank(found, mesh["cp"].get_local_rank(), parallel.context)
        x = joined(case.layout, found)
        return x.chunk(parallel.tp)[mesh["tp"].get_local_rank()] if parallel.sequence else x

    x = shard([one.detach() for one in own]).clone().requires_grad_()
    arguments = call(case)
    if encoder is not None:
        arguments["encoder_output"] = shard(encoder)
    out = layer(x, **arguments, **options)
    out.backward(shard(cotangent))
    found, right = [out.detach(), x.grad], [shard(needed).detach(), shard(of_own)]
    for name, one in layer.named_parameters():
        gradient = one.grad
        assert gradient is not None, name
        if isinstance(gradient, DTensor):
            assert isinstance(one, DTensor)
            assert gradient.placements == one.placements, name
            gradient = gradient.full_tensor()
        if parallel.context > 1:
            dist.all_reduce(gradient, group=mesh.get_group("cp"))
        if exact[2][name].abs().max() < VANISHING:
            # As that of a number added to all keys: all of it is rounding.
            assert gradient.abs().max() < 1e-3, name
            continue
        found.append(gradient)
        right.append(of_weights[name])
    return largest_difference(found, right) / max(BOUND, MORE * of_plain)


def _plain(
    case: LayerCase, weights: Mapping[str, torch.Tensor], own: Heads, encoder: Heads | None, dtype: torch.dtype
) -> tuple[Heads, Heads, Mapping[str, torch.Tensor], Heads]:
    """Output, gradients of tokens and of weights, and the cotangent of the output."""
    leaves = [x.to(dtype).requires_grad_() for x in own]
    of_encoder = None if encoder is None else [x.to(dtype) for x in encoder]
    parameters = {name: one.to(dtype).requires_grad_() for name, one in weights.items()}
    needed = plain(case, parameters, leaves, of_encoder)
    generator = torch.Generator().manual_seed(case.attention.seed)
    cotangent = [torch.randn(x.shape, generator=generator) for x in needed]
    total = sum((x * y.to(dtype)).sum() for x, y in zip(needed, cotangent, strict=True))
    assert isinstance(total, torch.Tensor)
    gradients = torch.autograd.grad(total, [*leaves, *parameters.values()])
    of_weights = dict(zip(parameters, gradients[len(leaves) :], strict=True))
    return [x.detach() for x in needed], list(gradients[: len(leaves)]), of_weights, cotangent


def _set_local(parameter: DTensor, entire: torch.Tensor) -> None:
    with torch.no_grad():
        placement = parameter.placements[0]
        local = parameter.to_local()
        if placement.is_shard():
            dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
            entire = entire.chunk(parameter.device_mesh.size(), dim)[parameter.device_mesh.get_local_rank()]
        local.copy_(entire)

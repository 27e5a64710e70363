"""What ranks run in the tests of two hops: the outputs of experts on drawn tokens, their gradients, and the bytes that each rank sends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.program.walk import ExpertGroup
from shardwright.engine_torch.experts.experts import _expert_outputs
from shardwright.engine_torch.experts.grouped import Matrices
from shardwright.engine_torch.io.layer_io import ExpertLinks
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.models import build
from shardwright.models.layers.decoder import walk_of

EMBED, WIDTH = 6, 4
AXES: tuple[str, ...] = ("node", "expert")


class Drawn(NamedTuple):
    """Tokens of all ranks: of each rank (x, experts, weights). ``top_k``, ``experts``, and the matrices of all experts."""

    experts: int
    top_k: int
    of_rank: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    matrices: list[torch.Tensor]


def drawn(seed: int, num_ranks: int) -> Drawn:
    """Odd numbers of tokens, none on some ranks; tokens that are padding, and assignments that were dropped."""
    draw, make = random.Random(seed), torch.Generator().manual_seed(seed)
    experts = num_ranks * draw.choice((1, 2, 3))
    top_k = draw.randint(1, min(8, experts))
    favourites = draw.random() < 0.3
    of_rank = []
    for _ in range(num_ranks):
        tokens = draw.choice((0, 1, 3, 7, 13))
        rows = []
        for _ in range(tokens):
            pool = range(max(top_k, experts // 4)) if favourites else range(experts)
            chosen = draw.sample(pool, top_k)
            padding = draw.random() < 0.1
            rows.append([experts if padding or draw.random() < 0.1 else one for one in chosen])
        numbers = torch.tensor(rows, dtype=torch.int32).view(tokens, top_k)
        x = torch.randn(tokens, EMBED, generator=make)
        of_rank.append((x, numbers, torch.rand(tokens, top_k, generator=make)))
    shapes = (experts, WIDTH, EMBED), (experts, WIDTH, EMBED), (experts, EMBED, WIDTH)
    return Drawn(experts, top_k, of_rank, [0.3 * torch.randn(shape, generator=make) for shape in shapes])


def directly(one: Drawn) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The outputs of each rank's tokens by the definition, on one rank, with the gradients of the sum of their sines."""
    inputs = [(x.clone().requires_grad_(), n, w.clone().requires_grad_()) for x, n, w in one.of_rank]
    matrices = [m.clone().requires_grad_() for m in one.matrices]
    outputs = []
    for x, numbers, weights in inputs:
        hidden = torch.nn.functional.silu(torch.einsum("xm,efm->xef", x, matrices[0]))
        hidden = hidden * torch.einsum("xm,efm->xef", x, matrices[1])
        y = torch.einsum("xef,emf->xem", hidden, matrices[2])
        chosen = torch.nn.functional.one_hot(numbers.long(), one.experts + 1)[..., :-1].to(y.dtype)
        outputs.append(torch.einsum("xem,xke,xk->xm", y, chosen, weights))
    torch.cat(outputs).sin().sum().backward()
    gradients = {
        "x": [x.grad for x, _, _ in inputs],
        "weights": [w.grad for _, _, w in inputs],
        "matrices": [m.grad for m in matrices],
    }
    return [out.detach() for out in outputs], gradients


def group_of(num: int) -> ExpertGroup:
    """The operations of so many experts."""
    walk = walk_of(build("mixtral-test", {"num_experts": str(num)}).architecture)
    (group,) = (one for operations in walk.layers.values() for one in operations if isinstance(one, ExpertGroup))
    return group


def sent_by(one: Drawn, rank: int, mesh: Mesh) -> dict[str, int]:
    """Bytes that a rank sends to others, forward, token by token: to nodes, and inside its own node."""
    nodes, inside = mesh.size(["node"]), mesh.size(["expert"])
    of_node, of_rank = one.experts // nodes, one.experts // nodes // inside
    own, place = divmod(rank, inside)
    row, known = EMBED * 4, one.top_k * (4 + 4)
    to_nodes = back = within = 0
    for source in range(nodes):
        for numbers in one.of_rank[source * inside + place][1].tolist():
            used = {n // of_node for n in numbers if n < one.experts}
            if source == own:
                to_nodes += len(used - {own}) * (row + known)
            if own in used:
                back += row * (source != own)
                within += row * sum(
                    n // of_node == own and n // of_rank % inside != place for n in numbers if n < one.experts
                )
    # What a rank multiplied goes back to those that sent it.
    for source in range(nodes):
        for other in set(range(inside)) - {place}:
            for numbers in one.of_rank[source * inside + other][1].tolist():
                within += row * sum(n // of_rank == rank for n in numbers if n < one.experts)
    return {"node": to_nodes + back, "expert": within}


class Found(NamedTuple):
    output: torch.Tensor
    gradients: dict[str, Any]
    sent: dict[str, int]
    back: dict[str, int]


def outputs_in_two_hops(mesh: Mesh, seeds: Sequence[int]) -> list[Found]:
    """Of each seed what this rank makes of its tokens."""
    ranks = Ranks(mesh, [("node",), ("expert",)], torch.device("cpu"))
    return [_found(ranks, drawn(seed, mesh.num_devices)) for seed in seeds]


def _found(ranks: Ranks, one: Drawn) -> Found:
    rank, own = ranks.rank, one.experts // ranks.mesh.num_devices
    x, numbers, weights = one.of_rank[rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    matrices = [m[rank * own : (rank + 1) * own].clone().requires_grad_() for m in one.matrices]
    group = group_of(one.experts)
    links = ExpertLinks(nodes=ranks.peers(("node",)), peers=ranks.peers(("expert",)), even_rows=x.shape[0] * one.top_k)
    by_group = {id(ranks.peers((axis,)).group): axis for axis in AXES}
    sent = dict.fromkeys(AXES, 0)
    send = dist.all_to_all_single

    def counted(output, input, output_sizes=None, input_sizes=None, group=None, **more):  # noqa: A002
        if input.is_floating_point() or input.dtype == torch.int32:
            me, sizes = dist.get_rank(group), input_sizes or [input.shape[0] // dist.get_world_size(group)] * 2
            rows = sum(size for number, size in enumerate(sizes) if number != me)
            sent[by_group[id(group)]] += rows * input[:1].numel() * input.element_size() if rows else 0
        return send(output, input, output_sizes, input_sizes, group=group, **more)

    with mock.patch.object(dist, "all_to_all_single", counted):
        out, overflow = _expert_outputs(x[None], numbers[None], weights[None], Matrices(*matrices), group, links, {})
        assert int(overflow) == 0
        forward = dict(sent)
        out.sin().sum().backward()
    gradients = {"x": x.grad, "weights": weights.grad, "matrices": [m.grad for m in matrices]}
    return Found(out[0].detach(), gradients, forward, {axis: sent[axis] - forward[axis] for axis in AXES})

"""The end of a step for modules with delayed amaxes: all that ranks agree on, in one collective for each group of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.modules.codes.quantizing import measure_together
from shardwright.engine_torch.modules.products import ProductModule
from shardwright.engine_torch.precision.delayed import Kept, reduce_together

DIGEST_MODULUS = 2**31 - 1
SATURATED = 2.0
"""The largest element of few tokens is often larger than all before, and hardly ever twice as large, for which there is ``margin=1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """What is kept of an operand. ``where``: for people."""

    where: str
    kept: Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of ranks, with what it reduces, and what its ranks must all have: replicas are compared, and never reduced over."""

    peers: Peers
    reduced: list[_Named]
    compared: list[_Named]


@torch.no_grad()
def update_scales(module: nn.Module) -> None:
    """Go on to the scales of the next step, in all modules with delayed amaxes inside of ``module``; others have none.

    Called once a step on every rank, after the last backward pass of it: the amaxes of a step are those of all its
    microbatches. An all-reduce (maximum) for each group of ranks: of weights tp, where it shards them, and of tokens ``amax_group``, by default
    all ranks.

    Warns where an element was more than ``SATURATED`` times as large as its factor holds: its code was the largest one. The factor of the
    next step holds it.

    Raises InputError where the state is that of another recipe; and, on every rank of a group, where its ranks have other factors or
    histories: with both values.
    """
    named = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, ProductModule) and child.delayed is not None
    }
    modules = list(named.values())
    for one in modules:
        assert one.delayed is not None
        one.delayed.require_recipe()
    measure_together([weight for module in modules for weight in module.resting.to_quantize()])
    for group in _groups(modules):
        mine = _digest(group.compared)
        both = torch.stack([mine, -mine]).to(torch.int32)
        reduce_together([*(one.kept.amax for one in group.reduced), both], group.peers)
        largest, least = both.tolist()
        if largest != -least:
            raise _different(group.compared, group.peers)
    _warn_of_saturation(named)
    for one in modules:
        assert one.delayed is not None
        one.delayed.follow(one.num_sources)
        one.resting.follow()


def _warn_of_saturation(modules: Mapping[str, ProductModule]) -> None:
    """One warning of the largest, on the first rank of those that have tokens of the module."""
    overflows = {
        f"{owner.label}{name and f' at {name}'}: {operand} of '{weight}'": overflow
        for name, owner in modules.items()
        if owner.delayed is not None and (not dist.is_initialized() or dist.get_rank(owner.amax_group) == 0)
        for (weight, operand), overflow in owner.delayed.overflow(owner.num_sources).items()
    }
    if not overflows:
        return
    times = dict(zip(overflows, torch.stack(list(overflows.values())).tolist(), strict=True))
    saturated = {where: ratio for where, ratio in times.items() if ratio > SATURATED}
    if saturated:
        where = max(saturated, key=saturated.__getitem__)
        others = f" ({len(saturated) - 1} more of {len(times)} operands also overflowed)" if len(saturated) > 1 else ""
        warnings.warn(
            f"{where} was up to {saturated[where]:.3g} times what its factor holds{others}: such elements had the largest code, so the "
            f"gradients of this step are too small. The factors of the next step hold them. Tokens, weights or the loss are larger than in "
            f"the steps before; margin=1 of the recipe leaves room for twice as large ones.",
            stacklevel=3,
        )


def _groups(modules: Sequence[ProductModule]) -> Iterable[_Group]:
    found: dict[dist.ProcessGroup, _Group] = {}
    for one in modules:
        assert one.delayed is not None
        peers_of = one.delayed_peers()
        widest = max(peers_of.values(), key=lambda peers: peers.size)
        for (weight, operand), peers in peers_of.items():
            named = _Named(where=f"{one.label}: {operand} of '{weight}'", kept=one.delayed.kept(weight, operand))
            for group, each in ((peers.group, peers), (widest.group, widest)):
                if group is not None:
                    known = found.setdefault(group, _Group(peers=each, reduced=[], compared=[]))
                    (known.reduced if each is peers else known.compared).append(named)
    return found.values()


def _digest(found: Sequence[_Named]) -> torch.Tensor:
    if not found:
        return torch.zeros((), dtype=torch.int64)
    bits = torch.cat([each.reshape(-1) for one in found for each in (one.kept.factor, one.kept.history)])
    numbers = bits.view(torch.int32).long()
    places = torch.arange(len(numbers), device=numbers.device) % 65521 + 1
    return (numbers * places).sum() % DIGEST_MODULUS


def _different(found: Sequence[_Named], peers: Peers) -> InputError:
    """The first operand of which ranks keep other numbers, with both."""
    mine = [[float(one.kept.factor), *one.kept.history.tolist()] for one in found]
    of_all: list[list[list[float]]] = [[]] * peers.size
    dist.all_gather_object(of_all, mine, group=peers.group)
    assert peers.group is not None
    ranks = dist.get_process_group_ranks(peers.group)
    for number, one in enumerate(found):
        first = of_all[0][number]
        for rank, numbers in zip(ranks, of_all, strict=True):
            for place, (ours, theirs) in enumerate(zip(first, numbers[number], strict=True)):
                if ours != theirs:
                    what = "factor" if place == 0 else f"history (place {place - 1})"
                    return InputError(
                        f"{one.where}: the ranks differ in its {what}: {ours!r} on rank {ranks[0]}, {theirs!r} on rank {rank}. Load "
                        f"one checkpoint on all ranks, and call update_scales on all of them in every step; ranks that share no "
                        f"tokens need an amax_group of their own."
                    )
    raise AssertionError("equal numbers have equal digests")

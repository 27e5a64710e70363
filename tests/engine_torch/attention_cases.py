"""Drawn calls of attention, and what each gives: one sequence and one head after another, by PyTorch's attention with a mask made of loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.nn import functional

from shardwright.engine_torch.modules import DotProductAttention

KINDS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
Heads = list[torch.Tensor]
"""Of each sequence, ``[tokens, heads, channels]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """``rooms``: the tokens of each sequence with its padding; ``real``: without. Of queries and of keys."""

    layout: str
    kind: str
    window: tuple[int, int] | None
    diagonal: bool | None
    heads: int
    kv_heads: int
    channels: tuple[int, int]
    rooms: tuple[Sequence[int], Sequence[int]]
    real: tuple[Sequence[int], Sequence[int]]
    as_mask: bool
    seed: int

    @property
    def bottom_right(self) -> bool:
        """As Transformer Engine's table has it."""
        if "causal" in self.kind:
            return self.kind.endswith("bottom_right")
        return self.diagonal is not False


def drawn_case(seed: int, ranks: int = 1, kinds: Sequence[str] = KINDS) -> AttentionCase:
    """``ranks``: of context parallelism, which shard each sequence into two chunks a rank."""
    draw = Random(seed)
    kind = draw.choice(kinds)
    layout = draw.choice(["sbhd", "bshd", "thd"] if "padding" in kind else ["sbhd", "bshd"])
    unit, num = (2 * ranks if ranks > 1 else 1), draw.randint(1, 3)
    same = draw.random() < 0.6

    def rooms() -> list[int]:
        sizes = [draw.randint(1, 5 if ranks > 1 else 13) * unit for _ in range(num)]
        return sizes if layout == "thd" else sizes[:1] * num

    of_queries = rooms()
    of_keys = of_queries if same else rooms()
    real = [[draw.randint(1, room) if "padding" in kind else room for room in side] for side in (of_queries, of_keys)]
    if same:
        real[1] = real[0]
    window: tuple[int, int] | None = None
    if draw.random() < 0.5:
        window = (draw.randint(0, 9), 0 if "causal" in kind else draw.randint(0, 9))
    kv_heads = draw.choice([1, 2, 3]) if ranks == 1 else ranks * draw.choice([1, 2])
    return AttentionCase(
        layout=layout,
        kind=kind,
        window=window,
        diagonal=None if "causal" in kind else draw.choice([None, True, False]),
        heads=kv_heads * draw.choice([1, 2, 3]),
        kv_heads=kv_heads,
        channels=(draw.choice([2, 4, 6]), draw.choice([2, 4, 6])),
        rooms=(of_queries, of_keys),
        real=(real[0], real[1]),
        as_mask=layout != "thd" and ranks == 1 and draw.random() < 0.5,
        seed=seed,
    )


def tensors(case: AttentionCase) -> tuple[Heads, Heads, Heads, Heads, torch.Tensor | None]:
    """Queries, keys, values and the cotangent of the output, and an arbitrary mask."""
    generator = torch.Generator().manual_seed(case.seed)

    def drawn(rooms: Sequence[int], heads: int, channels: int) -> Heads:
        return [torch.randn(room, heads, channels, generator=generator) for room in rooms]

    (of_queries, of_keys), (d, e) = case.rooms, case.channels
    arbitrary = None
    if case.kind == "arbitrary":
        shape = (len(of_queries), case.heads, of_queries[0], of_keys[0])
        arbitrary = torch.rand(shape, generator=generator) < 0.4
    return (
        drawn(of_queries, case.heads, d),
        drawn(of_keys, case.kv_heads, d),
        drawn(of_keys, case.kv_heads, e),
        drawn(of_queries, case.heads, e),
        arbitrary,
    )


def visible(case: AttentionCase, number: int) -> torch.Tensor:
    """Of one sequence, whether a query attends to a key, without an arbitrary mask."""
    (q_room, k_room), (q_real, k_real) = (tuple(side[number] for side in sides) for sides in (case.rooms, case.real))
    before, after = case.window or (-1, -1)
    if "causal" in case.kind:
        after = 0
    shift = k_real - q_real if case.bottom_right else 0
    rows = []
    for i in range(q_room):
        centre = i + shift
        rows.append(
            [
                i < q_real
                and j < k_real
                and (before < 0 or j >= centre - before)
                and (after < 0 or j <= centre + after)
                for j in range(k_room)
            ]
        )
    return torch.tensor(rows)


def expected(case: AttentionCase, q: Heads, k: Heads, v: Heads, arbitrary: torch.Tensor | None) -> Heads:
    """Of each sequence, ``[tokens, heads, channels]``."""
    found = []
    for number, (queries, keys, values) in enumerate(zip(q, k, v, strict=True)):
        mask = visible(case, number)[None]
        if arbitrary is not None:
            mask = mask & ~arbitrary[number]
        heads = []
        for head in range(case.heads):
            of_head, shared = mask[min(head, len(mask) - 1)], head // (case.heads // case.kv_heads)
            seen = of_head.any(-1)
            out = torch.zeros(len(queries), values.shape[-1], dtype=values.dtype)
            if seen.any():
                out[seen] = functional.scaled_dot_product_attention(
                    queries[seen, head][None], keys[None, :, shared], values[None, :, shared], attn_mask=of_head[seen]
                )[0]
            heads.append(out)
        found.append(torch.stack(heads, dim=1))
    return found


def joined(layout: str, parts: Heads) -> torch.Tensor:
    if layout == "thd":
        return torch.cat(parts)
    return torch.stack(parts, dim=1 if layout == "sbhd" else 0)


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(list(lengths)).cumsum(0).tolist()], dtype=torch.int32)


def arguments(case: AttentionCase, arbitrary: torch.Tensor | None) -> dict[str, Any]:
    """Of the call."""
    if arbitrary is not None:
        return {"attention_mask": arbitrary}
    if "padding" not in case.kind:
        return {}
    if case.as_mask:
        masks = tuple(
            torch.stack([torch.arange(room) >= real for room, real in zip(*side, strict=True)])[:, None, None]
            for side in zip(case.rooms, case.real, strict=True)
        )
        return {"attention_mask": masks[0] if case.rooms[0] is case.rooms[1] else masks}
    found: dict[str, Any] = {}
    for side, rooms, real in zip(("q", "kv"), case.rooms, case.real, strict=True):
        found[f"cu_seqlens_{side}"] = cumulative(real)
        if case.layout == "thd":
            found[f"cu_seqlens_{side}_padded"] = cumulative(rooms)
    return found


def module_of(case: AttentionCase) -> DotProductAttention:
    return DotProductAttention(
        case.heads,
        case.channels,
        case.kv_heads,
        qkv_format=case.layout,  # pyright: ignore[reportArgumentType]
        attn_mask_type=case.kind,  # pyright: ignore[reportArgumentType]
        window_size=case.window,
        bottom_right_diagonal=case.diagonal,
    )


def largest_difference(found: Sequence[torch.Tensor], needed: Sequence[torch.Tensor]) -> float:
    """Relative to the largest value of each, or to the 1 of which inputs are: where a query attends to one key, its gradient is 0."""
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
        for one, other in zip(found, needed, strict=True)
    )


def difference_of_call(case: AttentionCase, **options: Any) -> float:
    """Of output and gradients of one process."""
    q, k, v, cotangent, arbitrary = tensors(case)
    leaves = [[x.requires_grad_() for x in side] for side in (q, k, v)]
    needed = joined(case.layout, expected(case, leaves[0], leaves[1], leaves[2], arbitrary))
    needed = needed.flatten(-2)
    flat = joined(case.layout, cotangent).flatten(-2)
    every = [x for side in leaves for x in side]
    gradients = torch.autograd.grad(needed, every, flat, allow_unused=True)
    out = module_of(case)(*(joined(case.layout, side) for side in leaves), **arguments(case, arbitrary), **options)
    found = torch.autograd.grad(out, every, flat, allow_unused=True)
    zeros = [torch.zeros_like(x) for x in every]
    pairs = [
        [zero if one is None else one for one, zero in zip(side, zeros, strict=True)] for side in (found, gradients)
    ]
    return largest_difference([out.detach(), *pairs[0]], [needed.detach(), *pairs[1]])


def on_rank(parts: Heads, rank: int, size: int) -> Heads:
    """A rank's two chunks of each sequence."""
    found = []
    for part in parts:
        chunks = part.chunk(2 * size)
        found.append(torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]))
    return found

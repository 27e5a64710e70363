"""Attention to keys that travel: each rank passes what it holds on to the next, until all queries have met all keys.

Ring attention (arXiv:2310.01889), with the softmax of arXiv:1805.02867, section 3: one piece of the keys after the other,
with a running maximum. What travels is keys and values, or the latent of which each rank makes them.

B rows, T tokens as queries, S tokens of one piece as keys, H heads, K KV heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwright.engine_torch.attention.scores import AttentionMask, Running, finished, with_keys
from shardwright.engine_torch.io.layer_io import Peers

KeysAndValues = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


def attend_around(
    q_BTHD: torch.Tensor,
    held: tuple[torch.Tensor, ...],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    ring: Peers,
) -> torch.Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks of the ring, BTHE.

    ``held``: what this rank passes on; ``keys_and_values`` makes BSKD and BSKE of it. ``mask`` has the positions and
    segments of the whole row of keys: they are small, and known before the first layer. A slope goes the other way round,
    and on its way each rank adds its part.
    """
    running: Running | None = None
    for step in range(ring.size):
        if step:
            held = tuple(passed_on(part, ring) for part in held)
        k_BSKD, v_BSKE = keys_and_values(held)
        seen = _piece(mask, (ring.index - step) % ring.size, ring.size)
        running = with_keys(running, q_BTHD, k_BSKD, v_BSKE, seen, scale)
    assert running is not None
    return finished(running, q_BTHD.dtype)


def passed_on(part: torch.Tensor, ring: Peers) -> torch.Tensor:
    """What the rank before this one held."""
    return _PassedOn.apply(part, ring)  # pyright: ignore[reportReturnType]


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, ring: Peers) -> torch.Tensor:
        ctx.ring = ring
        return _turned(part, ring, 1)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _turned(cotangents[0], ctx.ring, -1), None


def _turned(part: torch.Tensor, ring: Peers, by: int) -> torch.Tensor:
    assert ring.group is not None
    sent = part.contiguous()
    came = torch.empty_like(sent)
    to, source = (ring.order[(ring.index + turn) % ring.size] for turn in (by, -by))
    # Sent and received together: a rank that waited for its turn to receive would hold the ring.
    waits = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, dist.get_global_rank(ring.group, to), ring.group),
            dist.P2POp(dist.irecv, came, dist.get_global_rank(ring.group, source), ring.group),
        ]
    )
    for wait in waits:
        wait.wait()
    return came


def _piece(mask: AttentionMask, source: int, num: int) -> AttentionMask:
    """What queries see of the keys that came from one rank."""
    size = mask.kv_positions_BS.shape[1] // num
    return mask._replace(
        kv_positions_BS=mask.kv_positions_BS.narrow(1, source * size, size),
        kv_segments_BS=mask.kv_segments_BS.narrow(1, source * size, size),
    )

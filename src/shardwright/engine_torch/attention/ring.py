"""Ring attention: each rank sends its shard of keys to the next one, until every rank had every shard.

Ring attention (arXiv:2310.01889) with the online softmax of arXiv:1805.02867, section 3: one shard of the keys after the
other, with a running maximum. Ranks send keys and values, or the latent from which each rank computes them.

B rows, T tokens of queries, S tokens of one shard of keys, H heads, K KV heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwright.engine_torch.attention.scores import AttentionMask, OnlineSoftmax, accumulate_attention, normalized
from shardwright.engine_torch.io.layer_io import Peers
from shardwright.engine_torch.io.recomputation import one_operation

KeysAndValues = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


def ring_attention(
    q_BTHD: torch.Tensor,
    held: tuple[torch.Tensor, ...],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    ring: Peers,
) -> torch.Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks of the ring, BTHE.

    ``held``: the shard that this rank sends, one tensor or several; ``keys_and_values`` computes BSKD and BSKE from it.
    ``mask`` has the positions and segments of the full row of keys: they are small, and known before the first layer.

    The backward pass sends a cotangent in the reverse direction, and each rank adds its summand. So it has as many permutes
    as a forward pass.
    """
    softmax: OnlineSoftmax | None = None
    for step in range(ring.size):
        if step:
            held = tuple(passed_on(shard, ring) for shard in held)
        k_BSKD, v_BSKE = keys_and_values(held)
        visible = _mask_of_shard(mask, (ring.index - step) % ring.size, ring.size)
        softmax = accumulate_attention(softmax, q_BTHD, k_BSKD, v_BSKE, visible, scale)
    assert softmax is not None
    return normalized(softmax, q_BTHD.dtype)


def passed_on(shard: torch.Tensor, ring: Peers) -> torch.Tensor:
    """The previous rank's shard."""
    return _PassedOn.apply(shard, ring)  # pyright: ignore[reportReturnType]


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: torch.Tensor, ring: Peers) -> torch.Tensor:
        ctx.ring = ring
        return _permuted(shard, ring, 1)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _permuted(cotangents[0], ctx.ring, -1), None


@one_operation
def _permuted(shard: torch.Tensor, ring: Peers, by: int) -> torch.Tensor:
    """The shard of the rank ``by`` places before this one."""
    assert ring.group is not None
    sent = shard.contiguous()
    received = torch.empty_like(sent)
    to, source = (ring.order[(ring.index + offset) % ring.size] for offset in (by, -by))
    # Sent and received in one batch: if every rank sent before it received, all would wait for each other.
    waits = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, dist.get_global_rank(ring.group, to), ring.group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(ring.group, source), ring.group),
        ]
    )
    for wait in waits:
        wait.wait()
    return received


def _mask_of_shard(mask: AttentionMask, source: int, num: int) -> AttentionMask:
    """The mask of this rank's queries and the keys of rank ``source`` of ``num``."""
    size = mask.kv_positions_BS.shape[1] // num
    return mask._replace(
        kv_positions_BS=mask.kv_positions_BS.narrow(1, source * size, size),
        kv_segments_BS=mask.kv_segments_BS.narrow(1, source * size, size),
    )

"""Lookup in an embedding whose vocabulary is sharded over ranks: each token's row is looked up by the rank that has it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.engine_torch.io.layer_io import Links
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.layers.embedding import embed


def links_of_rank(index: int, num: int) -> Links:
    """A rank's links where nothing moves."""
    group = dist.ProcessGroup(index, num)
    peers = Peers(axes=("tensor",), size=num, index=index, group=group, order=tuple(range(num)))
    return Links(
        move=lambda _source, _target, array: array,
        use=lambda _name, weight, _component=None: weight,
        vocab={"embedding": peers},
    )


def test_each_entry_is_looked_up_by_the_one_rank_that_has_it() -> None:
    table_VM = torch.arange(1.0, 25.0).view(8, 3)
    tokens_BL = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]])
    by_rank = [
        embed(tokens_BL, {"embedding.tokens": shard}, links_of_rank(index, 4))
        for index, shard in enumerate(table_VM.chunk(4))
    ]
    assert torch.equal(torch.stack(by_rank).sum(dim=0), table_VM[tokens_BL])

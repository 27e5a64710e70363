"""Lookup in an embedding whose vocabulary is sharded over ranks: each token's row is looked up by the rank that has it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.private import imagined_ranks
from shardwright.engine_torch.layers.embedding import embed
from shardwright.engine_torch.modules import Embedding
from tests.engine_torch.own_saved import message


def peers_of_rank(index: int, num: int) -> Peers:
    group = dist.ProcessGroup(index, num)
    return Peers(axes=("tensor",), size=num, index=index, group=group, order=tuple(range(num)))


def test_each_entry_is_looked_up_by_the_one_rank_that_has_it() -> None:
    table_VM = torch.arange(1.0, 25.0).view(8, 3)
    tokens_BL = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]])
    by_rank = [embed(tokens_BL, shard, peers_of_rank(index, 4)) for index, shard in enumerate(table_VM.chunk(4))]
    assert torch.equal(torch.stack(by_rank).sum(dim=0), table_VM[tokens_BL])


@pytest.mark.parametrize(
    ("tokens", "needed"),
    [
        (torch.tensor([[0, 8]]), "Embedding: 8 is among its tokens, and it has the entries 0 to 7."),
        (torch.tensor([-1, 7]), "Embedding: -1 is among its tokens, and it has the entries 0 to 7."),
        (torch.tensor([0.5]), "Embedding: its tokens are torch.float32; they must be int64 or int32. Cast them."),
    ],
)
def test_a_token_that_no_rank_has_is_refused(tokens: torch.Tensor, needed: str) -> None:
    with imagined_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for module in (Embedding(8, 2), Embedding(8, 2, vocab_parallel=True, tp_mesh=mesh)):
            assert message(module, tokens).startswith(needed)
            assert module(tokens[:0].long()).numel() == 0

"""An embedding, whose entries tp may shard."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.layers.embedding import rows_of
from shardwright.engine_torch.modules.parallel import ParallelModule
from shardwright.engine_torch.modules.parts.arguments import require_local
from shardwright.engine_torch.modules.parts.initial import InitMethod, Parameter, weight_initial
from shardwright.engine_torch.modules.parts.tensor_parallel import exchanged


class Embedding(ParallelModule):
    """The rows of ``weight`` by their numbers.

    ``vocab_parallel``: tp shards the entries, Shard(0), as a column-parallel head has them; every rank of tp gives the same tokens,
    and has the output of all, or with ``sequence_parallel`` its shard of dim 0. Otherwise tp replicates the weight, and with
    ``sequence_parallel`` each rank gives its own tokens.

    >>> Embedding(5, 2)(torch.tensor([[0, 4, 0]])).shape
    torch.Size([1, 3, 2])
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        vocab_parallel: bool = False,
        init_method: InitMethod | None = None,
        **options: Any,
    ) -> None:
        if options.get("recipe") is not None:
            raise InputError("Embedding has no product that a recipe could quantize. Leave recipe out.")
        self.num_embeddings, self.embedding_dim, self.vocab_parallel = num_embeddings, embedding_dim, vocab_parallel
        weight = Parameter(
            name="weight",
            shape=(num_embeddings, embedding_dim),
            tp_dim=0 if vocab_parallel else None,
            initial=weight_initial(init_method),
        )
        super().__init__([weight], **options)

    def advice_on_sizes(self, size: int) -> str:
        return f" A vocabulary is filled up: take the larger number, also for a tied head, and give the loss the first {size} logits."

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        require_local(tokens, self.label)
        self._require_entries(tokens)
        peers = self.peers
        weight = self.weight_in_use("weight", self.weight.dtype)
        if not self.vocab_parallel or peers.group is None:
            return rows_of(weight, tokens)
        num = len(weight)
        own = tokens - peers.index * num
        is_own = (own >= 0) & (own < num)
        found = rows_of(weight, own.clamp(0, num - 1)) * is_own[..., None].to(weight.dtype)
        self.require_shards(found, peers)
        return exchanged(found, "scattered" if self.sequence_parallel else "summed", peers)

    def _require_entries(self, tokens: torch.Tensor) -> None:
        """Raises InputError for tokens that are no entries: those that no rank of tp has would be zeros. On a CPU only, which reads them at once."""
        if tokens.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{self.label}: its tokens are {tokens.dtype}; they must be int64 or int32. Cast them.")
        if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
            return
        least, largest = (int(bound) for bound in tokens.aminmax())
        if least < 0 or largest >= self.num_embeddings:
            wrong = least if least < 0 else largest
            raise InputError(
                f"{self.label}: {wrong} is among its tokens, and it has the entries 0 to {self.num_embeddings - 1}. Give num_embeddings of "
                f"the tokenizer, filled up to a multiple of the ranks."
            )

"""The handwritten Llama 3 of ``torch_llama3.py`` in stages, by ``torch.distributed.pipelining``. Without Shardwright.

B rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.handwritten.torch_llama3 import Block, Sizes


class Part(nn.Module):
    """Some blocks, with the embedding or the logits at the ends."""

    def __init__(self, sizes: Sizes, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab, sizes.embed) if first else None
        self.blocks = nn.ModuleDict({str(number): Block(sizes) for number in blocks})
        self.final_norm = nn.RMSNorm(sizes.embed, eps=sizes.eps) if last else None
        self.kernel = nn.Linear(sizes.embed, sizes.vocab, bias=False) if last else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        turn = positions[..., None].float() * torch.tensor(self.sizes.frequencies)
        cos, sin = turn.cos()[:, :, None], turn.sin()[:, :, None]
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks.values():
            if self.sizes.recomputed:
                x = checkpoint(block, x, cos, sin, mask[:, None], use_reentrant=False)
            else:
                x = block(x, cos, sin, mask[:, None])
        if self.kernel is not None and self.final_norm is not None:
            x = self.kernel(self.final_norm(x)).float()
        return x


class Step:
    """A training step of a rank: its part, a schedule of PyTorch, the mean loss over all valid tokens, clipped gradients, AdamW.

    ``mesh``: with the axes ``stage`` and ``fsdp``. ``units``: the blocks of each part.
    """

    def __init__(
        self,
        sizes: Sizes,
        values: Mapping[str, torch.Tensor],
        mesh: DeviceMesh,
        units: list[range],
        schedule: str,
        microbatches: int,
        rates: tuple[float, int, float, float],
    ) -> None:
        self.lr, self.warmup, weight_decay, self.clip = rates
        number, shards = mesh.get_local_rank("stage"), mesh["fsdp"]
        self.group = mesh.get_group("stage")
        self.is_first, self.is_last = number == 0, number == len(units) - 1
        self.part = Part(sizes, units[number], first=self.is_first, last=self.is_last)
        own = self.part.state_dict()
        self.part.load_state_dict({name: values[name] for name in own})
        if shards.size() > 1:
            for block in self.part.blocks.values():
                fully_shard(block, mesh=shards, reshard_after_forward=False)
            fully_shard(self.part, mesh=shards, reshard_after_forward=False)
        stage = PipelineStage(self.part, number, len(units), torch.device("cpu"), group=self.group)
        made = get_schedule_class(schedule)
        several = schedule not in ("GPipe", "1F1B")
        self.count = torch.ones(())
        self.schedule = made([stage] if several else stage, microbatches, loss_fn=self._loss, scale_grads=False)
        parameters = list(self.part.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
                {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-8,
            foreach=True,
        )
        self.shards = shards
        self.done = 0

    def _loss(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """``wanted``: targets and whether they are valid, along the last dim."""
        targets, valid = wanted.flatten(0, 1).unbind(dim=-1)
        each = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        # FSDP takes the mean over ranks.
        return (each * valid).sum() * self.shards.size() / self.count

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """The mean loss and the norm of the gradients before clipping."""
        self.count = batch["valid"].sum().float()
        dist.all_reduce(self.count, group=self.shards.get_group())
        fields = {"positions": batch["positions"], "segments": batch["segments"]}
        wanted = torch.stack([batch["targets"].long(), batch["valid"].long()], dim=-1)
        losses: list[torch.Tensor] = []
        given = (batch["tokens"],) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*given, target=wanted, losses=losses, return_outputs=False, **fields)
        else:
            self.schedule.step(*given, return_outputs=False, **fields)
        parameters = list(self.part.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        shards = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        # A sum is exact to more digits than PyTorch's norm of a large tensor. Each rank has other elements.
        square = torch.stack([one.square().sum() for one in shards]).sum()
        dist.all_reduce(square)
        total = square.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, self.clip, total)
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, self.done / self.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).sum().detach() / self.shards.size() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss), float(total)

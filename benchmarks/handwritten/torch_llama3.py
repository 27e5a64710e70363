"""A handwritten Llama 3 step for PyTorch: modules, FSDP2 over each block, AdamW. Without Shardwright.

B rows, L tokens, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of a model, and whether blocks are recomputed for the backward pass."""

    vocab: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    frequencies: tuple[float, ...]
    recomputed: bool


class Attention(nn.Module):
    """Grouped-query attention to the earlier tokens of the document, and the token itself."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q = nn.Linear(sizes.embed, sizes.heads * sizes.head_dim, bias=False)
        self.k = nn.Linear(sizes.embed, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v = nn.Linear(sizes.embed, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o = nn.Linear(sizes.heads * sizes.head_dim, sizes.embed, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.sizes.head_dim)) for one in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.sizes.heads != self.sizes.kv_heads,
        )
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.embed, sizes.mlp, bias=False)
        self.up = nn.Linear(sizes.embed, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.embed, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm and attention, norm and feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.embed, eps=sizes.eps)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.embed, eps=sizes.eps)
        self.mlp = FeedForward(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.mlp(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Tokens to the summed loss of a rank's rows."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab, sizes.embed)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.final_norm = nn.RMSNorm(sizes.embed, eps=sizes.eps)
        self.kernel = nn.Linear(sizes.embed, sizes.vocab, bias=False)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        positions, segments = batch["positions"], batch["segments"]
        turn = positions[..., None].float() * torch.tensor(self.sizes.frequencies)
        cos, sin = turn.cos()[:, :, None], turn.sin()[:, :, None]
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        x = self.tokens(batch["tokens"])
        for block in self.blocks:
            if self.sizes.recomputed:
                x = checkpoint(block, x, cos, sin, mask[:, None], use_reentrant=False)
            else:
                x = block(x, cos, sin, mask[:, None])
        logits = self.kernel(self.final_norm(x)).float()
        each = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten().long(), reduction="none")
        return (each * batch["valid"].flatten()).sum()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sharded(sizes: Sizes, values: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> Decoder:
    """The model with the given values, by the names of its parameters; FSDP over one axis, HSDP over two."""
    model = Decoder(sizes)
    model.load_state_dict(dict(values))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Step:
    """A training step: mean loss over all valid tokens, clipped gradients, AdamW after a warm-up."""

    def __init__(self, model: Decoder, lr: float, warmup: int, weight_decay: float, clip: float) -> None:
        self.model, self.lr, self.warmup, self.clip = model, lr, warmup, clip
        matrices = [one for one in model.parameters() if one.ndim > 1]
        scales = [one for one in model.parameters() if one.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": scales, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            eps=1e-8,
            foreach=True,
        )
        self.done = 0

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """The mean loss and the norm of the gradients before clipping."""
        count = batch["valid"].sum().float()
        dist.all_reduce(count)
        summed = self.model(batch)
        # FSDP takes the mean over ranks.
        (summed * dist.get_world_size() / count).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, self.done / self.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = summed.detach()
        dist.all_reduce(loss)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(loss / count), float(whole)

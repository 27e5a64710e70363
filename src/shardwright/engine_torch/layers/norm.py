"""RMS normalization (arXiv:1910.07467)."""

from __future__ import annotations

import torch

from shardwright.engine_torch.io.dtypes import computed, kept


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` over its root mean square along the last dim, times ``scale``."""
    wide = x.to(computed("norm", x.dtype))
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * scale.to(wide.dtype)).to(kept("norm", x.dtype))

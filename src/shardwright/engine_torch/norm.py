"""RMS normalisation (arXiv:1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` over its root mean square along the last dim, times ``scale``: in float32, given back in x's dtype."""
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * scale.float()).to(x.dtype)

"""The dtypes of a plan as PyTorch has them."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """
    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype

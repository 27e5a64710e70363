"""Attention in a dry run: by the kernel that a GPU runs, where a CPU has none for its shapes.

Without a kernel PyTorch materialises the scores of all queries and keys. On a CPU that is so where values are narrower than keys, as
those of DeepSeek's latent are; on a GPU such attention with a mask is the memory-efficient kernel. It holds the mask, its output, and one float32
number for each query and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Attention of tensors without values as a GPU computes it, also where a layer is computed again."""
    plain = functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        if v.shape[-1] == k.shape[-1]:
            return plain(q, k, v, **given)
        of_heads = given["attn_mask"].expand(-1, q.shape[1], -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, of_heads, True, scale=given["scale"])[0]

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain

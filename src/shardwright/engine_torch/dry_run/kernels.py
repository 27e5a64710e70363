"""What a GPU's kernels hold in a dry run.

Attention is by the kernel that a GPU runs, where a CPU has none for its shapes. Without a kernel PyTorch materialises the scores of all queries and keys. On a CPU that is so where values are narrower than keys, as
those of DeepSeek's latent are; on a GPU such attention with a mask is the memory-efficient kernel. It holds the mask, its output, and one float32
number for each query and head.

Functions that a GPU computes as kernels (``io/fused.py``) hold what they return, in contiguous rows: of their temporaries nothing is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.engine_torch.dry_run.held import Held
from shardwright.engine_torch.io.fused import imagined_as


class _Results:
    """The results of functions, by what they were called with. ``seen``: shape and dtype of each tensor, other leaves, and their structure."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.seen: dict[tuple[object, ...], tuple[Sequence[Any], Any]] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        key = (function, *map(_kind, arguments))
        with torch.no_grad():
            if key not in self.seen:
                with self.held.for_shapes():
                    leaves, structure = tree_flatten(function(*arguments))
                self.seen[key] = [_shape(one) for one in leaves], structure
            shapes, structure = self.seen[key]
            made = [
                arguments[0].new_empty(one.shape, dtype=one.dtype) if isinstance(one, _Shape) else one for one in shapes
            ]
        # Where a layer is recorded, no mode sees them.
        self.held.add(made)
        return tree_unflatten(made, structure)


class _Shape(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _shape(leaf: Any) -> Any:
    return _Shape(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _kind(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return tuple(map(_kind, argument)) if isinstance(argument, tuple) else (type(argument), argument)


@contextmanager
def kernels_of_a_gpu(held: Held) -> Iterator[None]:
    """Attention and fused functions of tensors without values as a GPU computes them, also where a layer is computed again."""
    plain = functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        if v.shape[-1] == k.shape[-1]:
            return plain(q, k, v, **given)
        of_heads = given["attn_mask"].expand(-1, q.shape[1], -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, of_heads, True, scale=given["scale"])[0]

    functional.scaled_dot_product_attention = attention
    try:
        with imagined_as(_Results(held)):
            yield
    finally:
        functional.scaled_dot_product_attention = plain

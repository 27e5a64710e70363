"""PyTorch's functions for the core's formula of quantizers (``core/recipes/formula.py``)."""

from __future__ import annotations

import torch

from shardwright.core.recipes.arrays import Arrays
from shardwright.core.recipes.formats import E8M0
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.fused import fused

Number = torch.Tensor | float | int


def _quotient(x: Number, y: Number) -> torch.Tensor:
    # Of two tensors: by a number, PyTorch multiplies with the reciprocal, which rounds twice.
    like = x if isinstance(x, torch.Tensor) else y
    assert isinstance(like, torch.Tensor)
    x, y = (one if isinstance(one, torch.Tensor) else torch.full_like(like, one) for one in (x, y))
    if on_gpu(like):
        # A kernel's own division is not exact. A quotient of float64 that is rounded again is: it has more than twice as many bits.
        return torch.true_divide(x.double(), y.double()).float()
    return torch.true_divide(x, y)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether the compiler makes kernels for these (``fused``)."""
    return x.is_cuda


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    if any(x.shape[dim] == 0 for dim in dims):
        return x.new_zeros([1 if dim in dims else size for dim, size in enumerate(x.shape)])
    if not on_gpu(x):
        return x.amax(dims, keepdim=True)
    # Dim by dim, first along the one whose elements are neighbours in memory: a compiler divides a reduction over all dims in the
    # middle of rows, and takes a remainder for each element.
    first = x.stride(dims[0]) < x.stride(dims[-1])
    for dim in (dims[0], *dims[:0:-1]) if first else dims[::-1]:
        x = x.amax(dim, keepdim=True)
    return x


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [size - x.shape[dim] if each == dim else length for each, length in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _first(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return _first_alone(x, dim, size) if torch.compiler.is_compiling() and not on_gpu(x) else x.narrow(dim, 0, size)


@torch.library.custom_op("shardwright::first", mutates_args=())
def _first_alone(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """One operation, which nothing is fused with: PyTorch 2.13 leaves out the last block of a dim on CPUs, where it is not full and all that
    computes it is one loop."""
    return x.narrow(dim, 0, size).clone()


@_first_alone.register_fake
def _(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return torch.empty_like(x.narrow(dim, 0, size))


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    # A GPU's products need contiguous rows: turned where codes are made, in one pass over them.
    x = x.contiguous() if on_gpu(x) else x
    return x.to(torch.uint8)


def _as_codes(x: torch.Tensor, dtype: str) -> torch.Tensor:
    # Not where bytes are made: of another view of them PyTorch's compiler makes a copy. And in a program that is compiled all read
    # scales of E8M0 as bytes, which its compiler for CPUs has not as numbers.
    return x if dtype == E8M0 and torch.compiler.is_compiling() else x.view(torch_dtype(dtype))


def _in_rows(x: torch.Tensor) -> bool:
    return not on_gpu(x) or x.stride(-1) == 1


ARRAYS = Arrays(
    # PyTorch 2.11 compiles no method that is taken from its class.
    float32=lambda x: x.float(),
    int32=lambda x: x.int(),
    bits=lambda x: x.view(torch.int32),
    of_bits=lambda x: x.view(torch.float32),
    quotient=_quotient,
    least=lambda x, y: x.clamp(max=y) if not isinstance(y, torch.Tensor) else torch.minimum(x, y),
    most=lambda x, y: x.clamp(min=y) if not isinstance(y, torch.Tensor) else torch.maximum(x, y),
    where=torch.where,
    largest=_largest,
    reshape=lambda x, shape: x.reshape(tuple(shape)),
    padded=_padded,
    first=_first,
    joined=lambda x, y: torch.cat((x, y), dim=-1),
    cast=lambda x, dtype: x.to(torch_dtype(dtype)),
    bytes_of=lambda x: x.view(torch.uint8),
    as_bytes=_as_bytes,
    as_codes=_as_codes,
    in_rows=_in_rows,
    fused=lambda function: fused(function),
)

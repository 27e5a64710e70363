"""The dtypes of a plan, and the core's table of dtypes (``core/model/precision.py``), as PyTorch dtypes."""

from __future__ import annotations

import torch

from shardwright.core.model.precision import PRECISION, Word, dtype_of


def torch_dtype(name: str) -> torch.dtype:
    """
    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def computed(what: str, computation: torch.dtype) -> torch.dtype:
    """The dtype in which a rank computes ``what``.

    >>> computed("norm", torch.bfloat16)
    torch.float32
    """
    return _dtype(PRECISION[what].computed, computation)


def kept(what: str, computation: torch.dtype) -> torch.dtype:
    """The dtype of the result that is passed on."""
    return _dtype(PRECISION[what].kept, computation)


def _dtype(word: Word | None, computation: torch.dtype) -> torch.dtype:
    assert word is not None
    return torch_dtype(dtype_of(word, computation=str(computation).removeprefix("torch.")))

"""Tensors in host memory: as opaque bytes, read for a save or copied while the program goes on; or put there until the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from shardwright.checkpoint.writing.copies import copied

SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STAGE_BYTES = 32 << 20
"""Page-locked memory of one copy under way. The copy itself is in ordinary memory: to lock as much as a state takes longer than to save it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a GPU's work: what was enqueued before it is done when ``event`` is."""

    device: torch.device
    event: torch.cuda.Event


def now_on(device: torch.device) -> Moment | None:
    """This moment, in the order of the program. None where tensors are in host memory, and everything before it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Moment(device=device, event=event)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements as opaque bytes, which NumPy accepts for every dtype. Transposed dims stay so: on a CPU nothing is copied."""
    host = _plain(tensor).cpu()
    return host.view(SAME_WIDTH[host.dtype.itemsize]).numpy().view(f"V{host.dtype.itemsize}")


def copied_bits(view: Callable[[], torch.Tensor], moment: Moment | None, earlier: np.ndarray | None) -> np.ndarray:
    """A copy of ``bits_of(view())``, in the memory of an earlier one if it fits. ``view`` is called here, in any thread.

    ``moment``: when the elements were those that are meant; they must not change before this returns. A GPU copies in a stream of its own,
    beside what was enqueued after ``moment``.
    """
    if moment is None:
        return copied(bits_of(view()), earlier)
    stream = _beside(moment.device)
    with torch.cuda.stream(stream):
        stream.wait_event(moment.event)
        tensor = _plain(view())
        bits = np.dtype(f"V{tensor.dtype.itemsize}")
        fits = earlier is not None and (earlier.dtype, earlier.shape) == (bits, tuple(tensor.shape))
        found = earlier if earlier is not None and fits else np.empty(tuple(tensor.shape), bits)
        source = tensor.reshape(-1).view(torch.uint8)
        target = torch.from_numpy(found.reshape(-1).view(np.uint8))
        stage = torch.empty(min(STAGE_BYTES, len(target)), dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(target), STAGE_BYTES):
            piece = source[start : start + STAGE_BYTES]
            stage[: len(piece)].copy_(piece, non_blocking=True)
            stream.record_event().synchronize()
            target[start : start + STAGE_BYTES] = stage[: len(piece)]
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as their memory has them: PyTorch conjugates and negates some views only when they are read."""
    return tensor.detach().resolve_conj().resolve_neg()


@torch.library.custom_op("shardwright::to_host", mutates_args=())
def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where there is a GPU, which copies beside what it computes. A custom operation, so that a dry run
    counts the host's memory apart: on a CPU both are the same."""
    if not x.is_cuda:
        return x.clone()
    stream = _beside(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return host


@to_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


TO_HOST = torch.ops.shardwright.to_host.default


@torch.library.custom_op("shardwright::from_host", mutates_args=())
def from_host(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device of what ``to_host`` made."""
    if device.type != "cuda":
        return host.clone()
    stream, now = _beside(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        found = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        found.copy_(host, non_blocking=True)
    now.wait_stream(stream)
    found.record_stream(now)
    return found


@from_host.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device)


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

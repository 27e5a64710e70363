"""Bytes from every rank to every other, for loads that ranks do together; a ``Carrier`` of the checkpoint store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from shardwright.checkpoint.exchange.schedule import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCarrier:
    """The ranks of a process group; None: all ranks. ``device``: where its collectives have their tensors."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    noun: str = "rank"

    @property
    def index(self) -> int:
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    def largest(self, number: int) -> int:
        found = torch.tensor([number], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found.item())

    def texts(self, text: str) -> Sequence[str]:
        found: list[str] = [""] * self.count
        dist.all_gather_object(found, text, group=self.group)
        return found

    def exchange(self, now: Round, sent: np.ndarray) -> np.ndarray:
        to, here = now.bytes_to(self.count), now.bytes_from(self.count)
        out = torch.empty(sum(here), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(out, torch.from_numpy(sent).to(self.device), here, to, group=self.group)
        return out.cpu().numpy()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the collectives of a group have their tensors: on this rank's GPU with NCCL alone, else on the host."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

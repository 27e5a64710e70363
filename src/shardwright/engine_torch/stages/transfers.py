"""What crosses between the stages: the residual stream, and its cotangent on the way back.

A rank sends and receives in the order of its timetable, which is the same at both ends of every pair of ranks. So a message needs no name,
and nothing waits for ever, even where a backend carries out the transfers of a pair one after the other (``core/schedules/transfers.py``).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.engine_torch.io.mesh import Peers


class Arriving(NamedTuple):
    """A tensor that a neighbour sends."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Transfers:
    """The transfers of a step. ``peers``: the ranks of the pipeline that this one sends to and receives from."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to send; ``to``: the rank in the pipeline."""
        # A tensor must exist until it is sent. Those that have been sent are freed here.
        while self._sent and self._sent[0][0].is_completed():
            self._finish()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._peers.group, group_dst=self._peers.order[to])
        assert work is not None
        self._sent.append((work, tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> Arriving:
        """Begin to receive into a tensor."""
        work = dist.irecv(tensor, group=self._peers.group, group_src=self._peers.order[source])
        assert work is not None
        return Arriving(tensor, work)

    def sum_output(self, output: torch.Tensor) -> None:
        """Sum an output over the ranks of the pipeline, in place: one has it, and the others have zeros."""
        dist.all_reduce(output, group=self._peers.group)

    def sum_gradient(self, cotangent: torch.Tensor) -> None:
        """The same of a cotangent. A name of its own, by which a dry run knows the pass."""
        dist.all_reduce(cotangent, group=self._peers.group)

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._finish()

    def _finish(self) -> None:
        work, _ = self._sent.popleft()
        work.wait()

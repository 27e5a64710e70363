"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch.distributed as dist

from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, trained


@pytest.fixture(scope="session")
def eight() -> Iterator[Ranks]:
    ranks = Ranks(8, in_group)
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
def four(eight: Ranks) -> Ranks:
    return eight.first(4)


@pytest.fixture(scope="session")
def one(eight: Ranks) -> Ranks:
    """A single device, in a process of its own."""
    return eight.first(1)


@pytest.fixture(scope="session")
def run_alone(one: Ranks) -> RunAlone:
    return cache(lambda alone: trained(one, alone))


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("fake", rank=0, world_size=1)
    yield
    dist.destroy_process_group()

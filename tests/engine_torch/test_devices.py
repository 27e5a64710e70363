"""The device of a rank on its host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.engine_torch.training.processes import alone, device_of


@pytest.mark.parametrize(
    ("rank", "environment", "number"),
    [
        (6, {}, 2),
        (6, {"LOCAL_RANK": "1"}, 1),
        (6, {"SLURM_LOCALID": "3"}, 3),
        (6, {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0),
        # Each rank has one visible GPU of its own, or several share one.
        (6, {"LOCAL_RANK": "5"}, 1),
    ],
)
def test_a_rank_takes_the_gpu_with_its_local_rank(
    rank: int, environment: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert device_of(rank, environment) == torch.device("cuda", number)
    assert taken == [torch.device("cuda", number)]


def test_without_gpus_it_takes_the_cpu() -> None:
    assert device_of(3, {"LOCAL_RANK": "1"}) == torch.device("cpu")


@pytest.mark.parametrize(("gpus", "backend"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_tensors_on_cpu_and_on_gpus_have_a_backend_each(
    gpus: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with alone():
        assert begun == [backend]

"""A run says where its build of PyTorch lacks kernels of codes that the device has, and the plan has taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright import Request, load_layout, make_plan, model_table
from shardwright.core.recipes.kernels import CPU, Device
from shardwright.engine_torch.training.run import lacking_kernels
from shardwright.layouts import load_recipe

B200 = Device(kind="GPU", capability=(10, 0))


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        ("mxfp8", B200, []),
        ("mxfp8", replace(B200, cuda=(12, 6)), ["'mx' needs a PyTorch that was built for CUDA 12.8"]),
        ("nvfp4", replace(B200, cuda=(12, 6)), ["'nvfp4' needs a PyTorch that was built for CUDA 12.8"]),
        ("fp8-block", Device(kind="GPU", capability=(9, 0), cuda=(12, 8)), ["built for CUDA 12.9"]),
        # What the chip lacks the plan says already (SW417), and a CPU is no place for speed.
        ("mxfp8", Device(kind="GPU", capability=(9, 0), cuda=(12, 6)), []),
        ("mxfp8", CPU, []),
    ],
)
def test_what_the_build_lacks_is_said(recipe: str, device: Device, said: list[str]) -> None:
    request = Request(
        layout=load_layout("fsdp"),
        table=model_table("llama3-test"),
        batch=8,
        length=128,
        devices=1,
        engine="torch",
        dtype="bfloat16",
        precision=load_recipe(recipe),
    )
    lines = lacking_kernels(make_plan(request), device)
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert line.startswith("products of codes are products of float32 here, many times slower: ")
        assert line.endswith(expected)

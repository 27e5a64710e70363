"""The kernels of products of codes: what a chip, an engine and a build of PyTorch have."""

from __future__ import annotations

import pytest

from shardwright.core.engines.engines import Engine
from shardwright.core.recipes.kernels import KERNELS, Device, product_kernels
from shardwright.core.recipes.presets import PRESETS, preset

CHIPS = {name: Device(kind="GPU", capability=capability) for name, capability in {
    "A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "B300": (10, 3), "RTX 5090": (12, 0)
}.items()}  # fmt: skip


def chosen(recipe: str, device: Device, engine: Engine = "torch", *, experts: bool = False) -> list[str]:
    kernels = product_kernels(preset(recipe).quantizers, device, engine, experts=experts, dtype="bfloat16")
    return [one.name for one in kernels.values()]


def why(recipe: str, device: Device, dtype: str = "bfloat16") -> set[str]:
    kernels = product_kernels(preset(recipe).quantizers, device, "torch", experts=False, dtype=dtype)
    return {one.why for one in kernels.values()}


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_b200_multiplies_the_codes_of_every_recipe_on_both_engines(recipe: str) -> None:
    """Alike, so that a plan of one engine and of the other have one rate. Of experts' tokens JAX has no blocks."""
    kernels = {
        engine: product_kernels(preset(recipe).quantizers, CHIPS["B200"], engine, experts=False, dtype="bfloat16")
        for engine in ("jax", "torch")
    }
    rates = {engine: [(one.name, one.kernel.rate) for one in found.values()] for engine, found in kernels.items()}
    assert rates["jax"] == rates["torch"]
    assert all(one.kernel.of_codes for one in kernels["torch"].values())
    experts = product_kernels(preset(recipe).quantizers, CHIPS["B200"], "torch", experts=True, dtype="bfloat16")
    assert all(one.kernel.of_codes for one in experts.values())


@pytest.mark.parametrize(
    ("recipe", "chip", "experts", "kernel"),
    [
        ("mxfp8", "B200", True, "mx of experts"),
        ("fp8-block", "B200", True, "mx of experts"),
        ("mxfp8", "B300", True, "mx"),
        ("mxfp8", "RTX 5090", True, "mx"),
        ("nvfp4", "B200", True, "nvfp4"),
        ("fp8-block", "H100", True, "fp8 by blocks"),
        ("mxfp8", "H100", False, "float32"),
        ("fp8-current", "A100", False, "float32"),
    ],
)
def test_pytorch_has_kernels_by_compute_capability(recipe: str, chip: str, experts: bool, kernel: str) -> None:
    assert set(chosen(recipe, CHIPS[chip], experts=experts)) == {kernel}


def test_a_build_of_pytorch_may_lack_some() -> None:
    """What it was built for; and products of all experts in one call, in whose place each expert has one."""
    b200, h100 = ({"kind": "GPU", "capability": capability} for capability in ((10, 0), (9, 0)))
    assert set(chosen("mxfp8", Device(**b200, of_experts=False), experts=True)) == {"mx"}  # pyright: ignore
    older, old = Device(**b200, cuda=(12, 6)), Device(**h100, cuda=(12, 8))  # pyright: ignore
    assert set(chosen("mxfp8", older)) == set(chosen("nvfp4", older)) == set(chosen("fp8-block", old)) == {"float32"}
    assert set(chosen("fp8-row", older)) == {"fp8"}
    assert why("mxfp8", older) == {"'mx' needs a PyTorch that was built for CUDA 12.8"}
    assert why("fp8-block", old) == {"'fp8 by blocks' needs a PyTorch that was built for CUDA 12.9"}


def test_what_is_lacking_is_said() -> None:
    assert why("mxfp8", CHIPS["H100"]) == {"'mx' needs compute capability 10.0"}
    assert why("fp8-current", CHIPS["A100"]) == {"'fp8' needs compute capability 8.9"}
    assert why("nvfp4", CHIPS["B200"], "float32") == {
        "PyTorch's products of codes give bfloat16, and the computation is in float32"
    }
    with_e5m2 = product_kernels(
        preset("mxfp8", fp8_format="HYBRID").quantizers, CHIPS["B200"], "torch", experts=False, dtype="bfloat16"
    )
    assert {one.why for one in with_e5m2.values()} == {"", "no kernel takes their formats, blocks and scales"}


def test_every_row_has_a_source_and_each_engine_a_kernel_for_everything() -> None:
    assert all(kernel.source for kernel in KERNELS)
    names = [(kernel.name, kernel.library) for kernel in KERNELS]
    assert len(names) == len(set(names))
    for library in ("xla", "aten"):
        assert next(kernel for kernel in reversed(KERNELS) if kernel.library == library).name == "float32"

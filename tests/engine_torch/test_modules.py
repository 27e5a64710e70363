"""Modules on meshes of four ranks: what one process computes, saved on one mesh and loaded onto another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.engine_torch.modules import (
    DotProductAttention,
    Embedding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from shardwright.engine_torch.modules.parallel import ParallelModule
from tests.engine_torch.module_cases import FIRST_STEPS, Alone, ModuleCase, after_loads, against_one_process
from tests.engine_torch.own_modules import DELAYED, POWER_OF_TWO, trained
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.refused_modules import refusal, refusals

RECIPES = (None, "fp8-current", "fp8-row", "fp8-block", "mxfp8")
COVERING = {
    ModuleCase("decoder", POWER_OF_TWO, "tp-sp"): "fsdp",
    ModuleCase("grouped", None, "hsdp"): "hsdp",
    ModuleCase("pair", DELAYED, "tp-sp"): "tp-sp",
}
"""Each module, and the mesh that loads what was saved. ``python -m tests.engine_torch.whole_modules`` has all of them."""


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_mesh_computes_what_one_process_does_and_another_loads_it(
    four: Ranks, one: Ranks, case: ModuleCase, tmp_path: Path
) -> None:
    ranks = four.run(trained, case.kind, case.model, case.recipe, str(tmp_path), True, FIRST_STEPS)
    for number, apart in enumerate(against_one_process(case, ranks, Alone(one))):
        assert apart.share <= 1, (number, apart)
    apart = after_loads(case, [COVERING[case]], ranks, four, tmp_path)
    assert apart.share <= 1, apart


def close(found: np.ndarray, needed: np.ndarray, bound: float, what: object) -> None:
    """Within a share of the largest value."""
    largest = float(np.abs(needed).max())
    np.testing.assert_allclose(found, needed, rtol=0, atol=bound * largest, err_msg=str(what))


NORMS: Sequence[tuple[ParallelModule, nn.Module]] = (
    (RMSNorm(24), nn.RMSNorm(24, eps=1e-5)),
    (LayerNorm(24), nn.LayerNorm(24)),
    (LayerNorm(24, eps=1e-3), nn.LayerNorm(24, eps=1e-3)),
)


@pytest.mark.parametrize(("module", "oracle"), NORMS, ids=str)
def test_a_norm_is_that_of_pytorch(module: ParallelModule, oracle: nn.Module) -> None:
    for one in module.parameters():
        nn.init.normal_(one)
    oracle.load_state_dict(module.state_dict())
    same(module, oracle, torch.randn(3, 5, 24))


class Gated(nn.Module):
    """With the weights of a ``LayerNormMLP``."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        for name, one in of.state_dict().items():
            self.register_parameter(name, nn.Parameter(one.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, gate, up, down = (
            self.get_parameter(f"{name}_weight") for name in ("layer_norm", "fc1_gate", "fc1", "fc2")
        )
        x = functional.rms_norm(x, (16,), 1 + norm, 1e-5)
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_a_norm_and_an_mlp_are_those_of_pytorch() -> None:
    torch.manual_seed(6)
    options: dict[str, Any] = {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False}
    module = LayerNormMLP(16, 24, activation="swiglu", **options)
    nn.init.normal_(module.layer_norm_weight)

    oracle = Gated(module)
    same(module, oracle, torch.randn(2, 5, 16))
    first = LayerNormLinear(16, 8, **options)
    needed = functional.rms_norm(torch.ones(3, 16).cumsum(1), (16,), eps=1e-5) @ first.weight.T
    close(first(torch.ones(3, 16).cumsum(1)).detach().numpy(), needed.detach().numpy(), 1e-6, "")


def same(module: nn.Module, oracle: nn.Module, x: torch.Tensor) -> None:
    found, needed = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = module(found), oracle(needed)
    cotangent = torch.randn_like(ours)
    ours.backward(cotangent)
    theirs.backward(cotangent)
    close(ours.detach().numpy(), theirs.detach().numpy(), 1e-6, "output")
    pairs = [("input", found, needed)] + [
        (name, one, module.get_parameter(name)) for name, one in oracle.named_parameters()
    ]
    for name, one, other in pairs:
        assert one.grad is not None
        assert other.grad is not None
        close(one.grad.numpy(), other.grad.numpy(), 2e-6, name)


def test_attention_is_that_of_one_head_after_another() -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 5)
    found = DotProductAttention(4, (8, 5), 2)(q, k, v).unflatten(2, (4, 5))
    for row, head in product(range(2), range(4)):
        scores = q[:, row, head] @ k[:, row, head // 2].T / 8**0.5
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        close(found[:, row, head].numpy(), (scores.softmax(-1) @ v[:, row, head // 2]).numpy(), 1e-6, (row, head))
    other = DotProductAttention(4, (8, 5), 2, qkv_format="bshd")(*(one.transpose(0, 1) for one in (q, k, v)))
    close(other.transpose(0, 1).numpy(), found.flatten(2).numpy(), 1e-6, "bshd")


def test_grouped_layers_are_one_linear_layer_after_another() -> None:
    torch.manual_seed(8)
    for recipe in RECIPES:
        grouped, x = GroupedLinear(3, 16, 8, recipe=recipe), torch.randn(10, 16)
        made = grouped(x, [4, 0, 6])
        made.sum().backward()
        for number, part in ((0, slice(0, 4)), (2, slice(4, 10))):
            layer = Linear(16, 8, recipe=recipe)
            layer.load_state_dict({name: grouped.state_dict()[f"{name}{number}"] for name in ("weight", "bias")})
            np.testing.assert_array_equal(made[part].detach().numpy(), layer(x[part]).detach().numpy())
        assert not grouped.get_parameter("weight1").grad.any()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_shared_weight_has_the_values_of_its_first_module() -> None:
    torch.manual_seed(9)
    for device in ("cpu", "meta"):
        tokens, head = Embedding(8, 4, device=device), Linear(4, 8, bias=False, device=device)
        head.weight = tokens.weight
        for one in (tokens, head):
            one.reset_parameters()
        assert head.weight is tokens.weight
        alone = Embedding(8, 4, device="meta")
        alone.seed = tokens.seed
        alone.reset_parameters()
        assert torch.equal(alone.weight, tokens.weight)


def test_any_function_gives_initial_values() -> None:
    torch.manual_seed(10)
    made = [Linear(4, 4, init_method=nn.init.orthogonal_) for _ in range(2)]
    for one in made:
        np.testing.assert_allclose((one.weight @ one.weight.T).detach().numpy(), np.eye(4), atol=1e-6)
    assert not torch.equal(made[0].weight, made[1].weight)


def with_values(layer: Linear) -> nn.Linear:
    oracle = nn.Linear(layer.in_features, layer.out_features, bias=layer.use_bias)
    oracle.load_state_dict(layer.state_dict())
    return oracle


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_a_linear_layer_of_pytorch_up_to_the_recipe(recipe: str | None) -> None:
    torch.manual_seed(3)
    layer = Linear(96, 40, recipe=recipe)
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    oracle, x = with_values(layer), torch.randn(5, 7, 96)
    found, needed = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(found).square().sum().backward()
    oracle(needed).square().sum().backward()
    # Of e4m3, two operands; of e5m2, the gradients of fp8-current, twice the error.
    bound = {None: 1e-6, "fp8-current": 2**-3}.get(recipe, 2**-4)
    assert found.grad is not None
    assert needed.grad is not None
    close(layer(x).detach().numpy(), oracle(x).detach().numpy(), bound, "output")
    close(found.grad.numpy(), needed.grad.numpy(), bound, "input")
    for name, one in oracle.named_parameters():
        gradient = getattr(layer, name).grad
        assert one.grad is not None
        assert gradient is not None
        close(gradient.numpy(), one.grad.numpy(), bound, name)
    if recipe is not None:
        assert not np.allclose(layer(x).detach().numpy(), oracle(x).detach().numpy(), rtol=1e-4)


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_what_the_norm_gives_is_returned_with_its_gradient(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(4)
    ours = kind(16, 32, return_layernorm_output=True)
    torch.manual_seed(4)
    alone, x = kind(16, 32), torch.randn(8, 16, requires_grad=True)
    y, normed = ours(x)
    needed = functional.layer_norm(x, (16,), alone.layer_norm_weight, alone.layer_norm_bias)  # pyright: ignore[reportArgumentType]
    assert torch.equal(y, alone(x))
    torch.testing.assert_close(normed, needed)
    cotangents = torch.randn_like(y), torch.randn_like(normed)
    wanted = torch.autograd.grad((alone(x), needed), (x, *alone.parameters()), cotangents)
    torch.testing.assert_close(torch.autograd.grad((y, normed), (x, *ours.parameters()), cotangents), wanted)


def test_a_scaled_product_of_pytorch_is_the_same() -> None:
    torch.manual_seed(4)
    layer, x = Linear(32, 16, bias=False, recipe="fp8-current"), torch.randn(8, 32)
    scales = [one.detach().abs().max() / 448 for one in (x, layer.weight)]
    codes = [
        (one.detach() / scale).to(torch.float8_e4m3fn) for one, scale in zip((x, layer.weight), scales, strict=True)
    ]
    by = functional.ScalingType.TensorWise
    needed = functional.scaled_mm(codes[0], codes[1].T, scales[0], by, scales[1], by, output_dtype=torch.float32)
    close(layer(x).detach().numpy(), needed.numpy(), 2**-9, "")


REFUSED: Mapping[str, str] = {
    "two dims": "Linear: tp_mesh has the dims fsdp, tp of sizes 2 x 2; it must have one dim. Give one of them, as mesh['tp'].",
    "no order": "Linear: tp_mesh has the ranks [2, 0, 1, 3] along 'tp', and their process group has them in ascending order. Make the "
    "mesh of ranks that ascend along each dim, as init_device_mesh does.",
    "no mesh": "Linear: tp_mesh is a str; it must be a DeviceMesh of one dim, as mesh['tp'].",
    "dim": "Linear: tp 2 shards dim 0 of 'weight' (9, 8), and does not divide 9. Take 8 or 10, or other tp ranks.",
    "block": "Linear: out_features=384 over tp 2 is 192 for each rank, and 'fp8-block' has blocks of 128 along it, which a shard "
    "must not divide. Take 256 or 512, fewer tp ranks, or a recipe without such blocks, as fp8-row.",
    "size": "Linear has tp_size=4, and tp_mesh has 2 ranks. Give the mesh of 4 ranks, or tp_size=2.",
    "sharded before": "Linear: 'weight' is a DTensor on the mesh fsdp 2 already. Call set_device_mesh before fully_shard, which "
    "reads the placement on tp.",
    "never placed": "Linear: 'weight' is (4, 8), the shard of one rank of tp_size=2, and its entire shape is (8, 8). Call "
    "set_device_mesh(mesh['tp']) before fully_shard.",
    "called inside": "Linear: 'weight' is a DTensor on the mesh fsdp 2 x tp 2, sharded at rest. Call the module through the one "
    "that was given to fully_shard, which gathers it.",
    "weights": "Linear: weight_mesh has the ranks [0, 2], and tp_mesh [0, 1]: it must have all of these too. [1] are missing.",
    "amax": "Linear: amax_group has the ranks [0, 2], and tp_mesh [0, 1]: it must have all of these too. [1] are missing.",
    "no member": "Linear: amax_group is no process group that rank 0 is in. Give each rank the group of the ranks with which it shares "
    "tokens.",
    "recipes": "Linear: the ranks differ in its recipe: fp8-row on rank 0, mxfp8 on rank 1. Give all ranks the same.",
    "recipes of one name": "Linear: the ranks differ in its recipe: fp8-current on rank 0, fp8-current reduce_amax=False on "
    "rank 1. Give all ranks the same.",
    "recipes at rest": "Linear: the ranks differ in its recipe: mxfp8 on rank 0, fp8-row on rank 2. Give all ranks the same.",
    "tokens": "Linear: dim 0 of its input is 3, and tp 2 does not divide it, as sequence_parallel needs. Pad it to a multiple of "
    "2.",
}
"""What rank 0 reads."""


def test_what_a_mesh_cannot_have_is_refused_on_every_rank(four: Ranks) -> None:
    ranks = four.run(refusals)
    assert ranks[0] == REFUSED
    assert all(text for rank in ranks for text in rank.values())


REFUSED_ALONE: Sequence[tuple[Callable[[], object], str]] = (
    (
        lambda: Linear(8, 8, recipe="mxfp4"),
        "there is no recipe 'mxfp4'. Did you mean 'nvfp4'? The recipes are fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, "
        "nvfp4, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling.",
    ),
    (
        lambda: Linear(8, 8, recipe=8),
        "recipe is a int; it must be one of fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, what "
        "shardwright.core.recipes.presets.preset gives, or Transformer Engine's DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, "
        "Float8BlockScaling, NVFP4BlockScaling.",
    ),
    (
        lambda: Linear(8, 8, return_bias=True),
        "Linear: return_bias=True is Transformer Engine's, and is not done here. Give bias=False, and add a bias of your own.",
    ),
    (lambda: Linear(8, 8, paralel_mode="row"), "Linear has no argument 'paralel_mode'. Did you mean 'parallel_mode'?"),
    (lambda: Linear(8, 8, parallel_mode="rows"), "parallel_mode is 'rows'; it must be 'column', 'row' or None."),  # pyright: ignore[reportArgumentType]
    (lambda: Linear(8, 8, tp_size=0), "Linear: tp_size is 0; it must be a whole number from 1."),
    (
        lambda: Linear(8, 8, parallel_mode="row", tp_size=2, name="down")(torch.ones(1, 4)),
        "Linear 'down' has tp_size=2, and its ranks are not known. Call set_device_mesh(mesh['tp']) before fully_shard.",
    ),
    (lambda: Linear(8, 8)(torch.ones(1, 4)), "Linear: its input is (1, 4); it must be [..., 8]."),
    (
        lambda: Linear(8, 8, recipe="mxfp8")(torch.ones(1, 8, dtype=torch.int64)),
        "Linear: its input is torch.int64; it must be floats, as bfloat16. Cast it.",
    ),
    (
        lambda: RMSNorm(8)(torch.ones(1, 8, dtype=torch.int32)),
        "RMSNorm: its input is torch.int32; it must be floats, as bfloat16. Cast it.",
    ),
    (
        lambda: Linear(8, 8, params_dtype=torch.float8_e4m3fn),
        "Linear: params_dtype is torch.float8_e4m3fn; it must be one of torch.float32, torch.bfloat16, torch.float16, torch.float64. "
        "Weights are quantized when they are multiplied, as recipe says.",
    ),
    (
        lambda: Linear(-1, 8),
        "Linear: dim 1 of 'weight' (8, -1) is -1; it must be a whole number from 1.",
    ),
    (
        lambda: Linear(8, 8, device="meta")(torch.ones(1, 8)),
        "Linear: 'weight' is on meta, without values. Call reset_parameters(defer_init=False).",
    ),
)


@pytest.mark.parametrize(("do", "text"), REFUSED_ALONE)
def test_bad_arguments_are_refused(do: Callable[[], object], text: str) -> None:
    assert refusal(do) == text


def test_arguments_of_transformer_engine_with_their_default_are_accepted() -> None:
    assert Linear(8, 8, fuse_wgrad_accumulation=False, return_bias=False, ub_name=None).in_features == 8
    assert LayerNormMLP(8, 8, activation_params=None).hidden_size == 8
    assert DotProductAttention(2, 4, window_size=(-1, 0), return_max_logit=False).attn_mask_type == "causal"

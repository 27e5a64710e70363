"""What programs do around modules: autocast, checkpointing, frozen weights, no tokens, several passes before one backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Recipe
from shardwright.engine_torch.modules import GroupedLinear, LayerNormMLP, Linear, update_scales

RECIPES: Mapping[str, str | Recipe | None] = {
    "none": None,
    **{name: name for name in ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4")},
    "nvfp4-nearest": preset("nvfp4", disable_rht=True, disable_stochastic_rounding=True),
}
Pass = Callable[[LayerNormMLP, torch.Tensor], torch.Tensor]


def mlp(recipe: str) -> LayerNormMLP:
    torch.manual_seed(1)
    return LayerNormMLP(64, 128, activation="swiglu", normalization="RMSNorm", recipe=RECIPES[recipe])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()


def made(run: Pass, module: LayerNormMLP, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and all gradients that there are."""
    y = run(module, x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    found = [one.grad for one in (x, *module.parameters()) if one.grad is not None]
    return [y.detach(), *found]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def plainly(module: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast_tokens_have_its_dtype_and_products_their_recipe(recipe: str) -> None:
    def cast(module: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    def by_hand(module: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
        """Only the norm has the tokens in float32."""
        normed = torch.nn.functional.rms_norm(x, (64,), module.layer_norm_weight, module.eps).bfloat16()
        hidden = [
            module.product_of_entered(normed, (f"{name}weight", f"{name}bias"), None) for name in ("fc1_", "fc1_gate_")
        ]
        return module.product(torch.nn.functional.silu(hidden[1]) * hidden[0], ("fc2_weight", "fc2_bias"), None)

    ours = made(cast, mlp(recipe), tokens(2, 8))
    theirs = made(by_hand, mlp(recipe), tokens(2, 8))
    assert ours[0].dtype == torch.bfloat16
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_grouped_layer_under_autocast_is_that_of_narrow_tokens(recipe: str) -> None:
    torch.manual_seed(1)
    module = GroupedLinear(2, 64, 32, recipe=RECIPES[recipe])
    x = tokens(5).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, [3, 2])
    assert torch.equal(y, module(x.bfloat16(), [3, 2]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_that_is_computed_again_has_the_same_bits(recipe: str, *, reentrant: bool) -> None:
    def again(module: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=reentrant)

    plain, recomputed = mlp(recipe), mlp(recipe)
    assert_equal(made(again, recomputed, tokens(2, 8)), made(plainly, plain, tokens(2, 8)))
    for one, other in zip(recomputed.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_leave_the_gradient_of_the_input(recipe: str) -> None:
    frozen = mlp(recipe).requires_grad_(requires_grad=False)
    assert_equal(made(plainly, frozen, tokens(2, 8)), made(plainly, mlp(recipe), tokens(2, 8))[:2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_passes_before_one_backward_are_the_sum_of_both(recipe: str) -> None:
    together, apart = mlp(recipe), mlp(recipe)
    first, second = tokens(2, 8).detach(), 3 * tokens(1, 8).detach()
    (together(first).sum() + together(second).sum()).backward()
    # In the order of the backward pass, which numbers random bits.
    for x in (second, first):
        apart(x).sum().backward()
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_have_an_empty_output_and_gradients_of_zero(recipe: str, shape: tuple[int, ...]) -> None:
    module, x = mlp(recipe), tokens(*shape)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.shape
    for one in module.parameters():
        assert one.grad is not None
        assert not one.grad.any()
    update_scales(module)
    if module.delayed is not None:
        assert module.delayed.fc2_weight_input_factor == 1


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """Codes have no derivative, so that it would be that of some other function."""
    x = tokens(4)
    (gradient,) = torch.autograd.grad(Linear(64, 32, recipe="mxfp8")(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_and_a_first_microbatch_change_nothing(recipe: str) -> None:
    """Weights are quantized in every pass."""
    module = mlp(recipe)

    def first(module: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
        return module(x, is_first_microbatch=True)

    assert_equal(made(first, deepcopy(module), tokens(2, 8)), made(plainly, module, tokens(2, 8)))

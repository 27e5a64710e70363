"""Modules on meshes of four ranks: what one process computes, saved on one mesh and loaded onto another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.engine_torch.modules import Linear
from tests.engine_torch.own_modules import MESHES, MODELS, Step, Trained, refusal, refusals, resumed, trained
from tests.engine_torch.ranks import Ranks
from tests.matrix import some

FOUR = [kind for kind in MESHES if kind != "one"]
RECIPES = (None, "fp8-current", "fp8-row", "fp8-block", "mxfp8")
CASES = [(model, recipe, kind) for model, recipe, kind in product(MODELS, RECIPES, FOUR)]

Alone = Callable[[str, str | None], Trained]


@pytest.fixture(scope="module")
def alone(one: Ranks) -> Alone:
    """The model in one process."""
    return cache(lambda model, recipe: one.run(trained, "one", model, recipe)[0])


def close(found: np.ndarray, needed: np.ndarray, bound: float, what: object) -> None:
    """Within a share of the largest value."""
    largest = float(np.abs(needed).max())
    np.testing.assert_allclose(found, needed, rtol=0, atol=bound * largest, err_msg=str(what))


def own_part(entire: np.ndarray, rank: Trained, kind: str) -> np.ndarray:
    for index, size in zip(rank.data, [size for axis, size in MESHES[kind].items() if axis != "tp"], strict=True):
        entire = np.split(entire, size)[index]
    return np.split(entire, rank.tp[1])[rank.tp[0]] if kind == "tp-sp" else entire


def own_codes(entire: np.ndarray, like: np.ndarray, rank: Trained) -> np.ndarray:
    """A rank's part of codes or scales: along the dim that is smaller."""
    for dim, (size, own) in enumerate(zip(entire.shape, like.shape, strict=True)):
        if size != own:
            entire = np.split(entire, rank.tp[1], axis=dim)[rank.tp[0]]
    return entire


def compare(found: Step, needed: Step, bound: float, what: object) -> None:
    assert found.gradients.keys() == needed.gradients.keys()
    for name, gradient in needed.gradients.items():
        close(found.gradients[name], gradient, bound, (what, name))
    assert found.norm == pytest.approx(needed.norm, rel=bound), what


@pytest.mark.parametrize("case", some(CASES, [3, 6, 9, 12]), ids=str)
def test_a_mesh_computes_what_one_process_does(
    four: Ranks, alone: Alone, case: tuple[str, str | None, str], tmp_path: Path
) -> None:
    model, recipe, kind = case
    right = alone(model, recipe)
    ranks = four.run(trained, kind, model, recipe, str(tmp_path), True)
    assert bool(right.codes) == (recipe is not None)
    for rank in ranks:
        for name, values in right.first.items():
            np.testing.assert_array_equal(rank.first[name], values, err_msg=name)
        for name, codes in right.codes.items():
            for found, needed in zip(rank.codes[name], codes, strict=True):
                np.testing.assert_array_equal(found, own_codes(needed, found, rank), err_msg=name)
        # A last bit that differs can move a value to the next code later, and AdamW divides small gradients by themselves.
        for number, (found, needed) in enumerate(zip(rank.steps, right.steps, strict=True)):
            bound = 1e-5 if number == 0 else 1e-3 if recipe is None else 2**-4
            close(found.output, own_part(needed.output, rank, kind), bound, (case, number))
            compare(found, needed, bound, (case, number))
    loaded_by(four, [kind, FOUR[FOUR.index(kind) - 1]], case, ranks, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mesh_loads_what_another_saved(four: Ranks, case: tuple[str, str | None, str], tmp_path: Path) -> None:
    model, recipe, kind = case
    ranks = four.run(trained, kind, model, recipe, str(tmp_path))
    loaded_by(four, [*FOUR, "one"], case, ranks, tmp_path)


def loaded_by(
    four: Ranks, onto: Sequence[str], case: tuple[str, str | None, str], before: Sequence[Trained], folder: Path
) -> None:
    """The next step on the same mesh is the same, bit for bit; on another within rounding, and a code of the recipe."""
    model, recipe, kind = case
    for other in onto:
        ranks = four if other in FOUR else four.first(1)
        for rank, (ours, theirs) in enumerate(ranks.run(resumed, other, model, recipe, str(folder))):
            needed = before[rank].steps[-1]
            for found in (ours, theirs) if theirs is not None else (ours,):
                if other == kind:
                    np.testing.assert_array_equal(found.output, needed.output)
                compare(found, needed, 0 if other == kind else 1e-5 if recipe is None else 2**-6, (case, other))


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
    "no mesh": "Linear: tp_mesh is a str; it must be a DeviceMesh of one dim, as mesh['tp'].",
    "dim": "Linear: tp 2 shards dim 0 of 'weight' (9, 8), and does not divide 9. Take 8 or 10, or other tp ranks.",
    "block": "Linear: out_features=384 over tp 2 is 192 for each rank, and 'fp8-block' has blocks of 128 along it, which a shard "
    "must not divide. Take a multiple of 256, fewer tp ranks, or a recipe without such blocks, as fp8-row.",
    "size": "Linear has tp_size=4, and tp_mesh has 2 ranks. Give the mesh of 4 ranks, or tp_size=2.",
    "sharded before": "Linear: 'weight' is a DTensor on the mesh fsdp 2 already. Call set_device_mesh before fully_shard, which "
    "reads the placement on tp.",
    "never placed": "Linear: 'weight' is (4, 8), the shard of one rank of tp_size=2, and its entire shape is (8, 8). Call "
    "set_device_mesh(mesh['tp']) before fully_shard.",
    "called inside": "Linear: 'weight' is a DTensor on the mesh fsdp 2 x tp 2, sharded at rest. Call the module through the one "
    "that was given to fully_shard, which gathers it.",
    "weights": "Linear: weight_mesh has the ranks [0, 2], and tp_mesh [0, 1]: it must have all of these too. [1] are missing.",
    "amax": "Linear: amax_group has the ranks [0, 2], and tp_mesh [0, 1]: it must have all of these too. [1] are missing.",
    "recipes": "Linear: the ranks differ in its recipe: fp8-row on rank 0, mxfp8 on rank 1. Give all ranks the same.",
    "recipes at rest": "Linear: the ranks differ in its recipe: mxfp8 on rank 0, fp8-row on rank 2. Give all ranks the same.",
    "seeds": "Linear: the ranks differ in its seed: 900450186894289455 on rank 0, 3081012064131973355 on rank 1. Call "
    "torch.manual_seed with one number on all ranks, and construct the same modules in the same order.",
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
        "nvfp4.",
    ),
    (
        lambda: Linear(8, 8, recipe=8),
        "recipe is a int; it must be one of fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, or what "
        "shardwright.core.recipes.presets.preset gives.",
    ),
    (
        lambda: Linear(8, 8, recipe="fp8-delayed"),
        "recipe 'fp8-delayed': it takes the amax of earlier steps (of input in output), which these modules do not compute. Use "
        "fp8-current, fp8-row, fp8-block or mxfp8.",
    ),
    (
        lambda: Linear(8, 8, recipe="nvfp4"),
        "recipe 'nvfp4': it rounds stochastically (of output_gradient in input_gradient), which these modules do not compute. Use "
        "fp8-current, fp8-row, fp8-block or mxfp8, or preset('nvfp4', disable_rht=True, disable_stochastic_rounding=True).",
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
        lambda: Linear(8, 8, device="meta")(torch.ones(1, 8)),
        "Linear: 'weight' is on meta, without values. Call reset_parameters(defer_init=False).",
    ),
)


@pytest.mark.parametrize(("do", "text"), REFUSED_ALONE)
def test_bad_arguments_are_refused(do: Callable[[], object], text: str) -> None:
    assert refusal(do) == text


def test_arguments_of_transformer_engine_with_their_default_are_accepted() -> None:
    assert Linear(8, 8, fuse_wgrad_accumulation=False, return_bias=False, ub_name=None).in_features == 8

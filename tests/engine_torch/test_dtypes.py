"""The dtypes in which PyTorch sums and returns values, with bfloat16 as the dtype of the computation. The oracle is float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.engine_torch.attention.scores import (
    AttentionMask,
    OnlineSoftmax,
    accumulate_attention,
    attend,
    normalized,
)
from shardwright.engine_torch.experts.experts import dispatch_rows
from shardwright.engine_torch.layers.embedding import rows_of
from shardwright.engine_torch.layers.product import product, weight_product
from shardwright.engine_torch.training.optimizer import apply_gradients
from shardwright.engine_torch.training.step import mean_of
from shardwright.training.optimizer import FIRST, SECOND, OptimizerOptions
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import torch_plan
from tests.engine_torch.training import tied_sums
from tests.sameness.cases import LLAMA3, case

HALF_ULP = 2.0**-8
"""The largest relative error of rounding to bfloat16."""


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    dice = np.random.default_rng(seed)
    return (torch.from_numpy(dice.normal(size=shape)) * scale).to(torch.bfloat16)


def test_logits_are_not_rounded() -> None:
    x, weight = drawn(2, 3, 64).requires_grad_(), drawn(40, 64, seed=1).requires_grad_()
    # The oracle's gradients stay in float64: rounded too, two sums at a tie would be a whole ulp apart.
    leaves = [one.detach().double().requires_grad_() for one in (x, weight)]
    logits = weight_product(x, weight, dtype=torch.float32)
    exact = leaves[0] @ leaves[1].T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    cotangents = torch.autograd.grad(logits, (x, weight), logits.detach())
    expected = torch.autograd.grad(exact, leaves, logits.detach().to(torch.bfloat16).double())
    for cotangent, one in zip(cotangents, expected, strict=True):
        assert cotangent.dtype == torch.bfloat16
        torch.testing.assert_close(cotangent.double(), one, rtol=HALF_ULP, atol=1e-3)


@pytest.mark.parametrize("pieces", [1, 4])
def test_scores_around_a_ring_are_not_rounded(pieces: int) -> None:
    """Scores of up to 40, whose last bits determine the probabilities: rounded, they would be off by an eighth."""
    q_BTHD, k_BSKD, v_BSKE = (
        drawn(1, 16, 4, 32, scale=3.0),
        drawn(1, 16, 2, 32, seed=1, scale=3.0),
        drawn(1, 16, 2, 8, seed=2),
    )
    places = torch.arange(16)[None]
    whole = AttentionMask(places, torch.ones_like(places), places, torch.ones_like(places))
    softmax: OnlineSoftmax | None = None
    size = 16 // pieces
    for start in range(0, 16, size):
        keys = slice(start, start + size)
        visible = whole._replace(kv_positions_BS=places[:, keys], kv_segments_BS=whole.kv_segments_BS[:, keys])
        softmax = accumulate_attention(softmax, q_BTHD, k_BSKD[:, keys], v_BSKE[:, keys], visible, 32**-0.5)
    assert softmax is not None
    assert {part.dtype for part in softmax} == {torch.float32}
    exact = attend(q_BTHD.double(), k_BSKD.double(), v_BSKE.double(), whole, 32**-0.5)
    # Probabilities are rounded before the product with the values, and the output once more.
    torch.testing.assert_close(normalized(softmax, torch.bfloat16).double(), exact, rtol=HALF_ULP, atol=0.01)


def test_batched_products_are_wide_forward_and_backward() -> None:
    x, y = drawn(3, 5, 32).requires_grad_(), drawn(3, 32, 7, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y: product(x, y, torch.float64),
        (x.detach().double().requires_grad_(), y.detach().double().requires_grad_()),
    )
    wide = product(x, y, torch.float32)
    torch.testing.assert_close(wide.double(), x.double() @ y.double(), rtol=1e-5, atol=1e-5)
    cotangent = drawn(3, 5, 7, seed=2)
    ours = torch.autograd.grad(wide, (x, y), cotangent.float())
    leaves = [one.detach().double().requires_grad_() for one in (x, y)]
    exact = torch.autograd.grad(leaves[0] @ leaves[1], leaves, cotangent.double())
    for rounded, one in zip(ours, exact, strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.double(), one, rtol=HALF_ULP, atol=1e-3)


@pytest.mark.parametrize(
    ("taken", "row"),
    [
        (lambda table, rows: rows_of(table, rows[None])[0], "embedding"),
        (dispatch_rows, "assignments"),
    ],
)
def test_a_frequent_row_gets_the_sum_of_all_its_cotangents(taken, row: str) -> None:
    """One row with a thousand cotangents of 1: in bfloat16 the sum would stop at 256."""
    table = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
    (cotangent,) = torch.autograd.grad(taken(table, torch.zeros(1000, dtype=torch.int64)).sum(), table)
    assert cotangent[0].tolist() == [1000, 1000], row
    assert not cotangent[1:].any()


def test_both_uses_of_a_tied_weight_are_summed_in_the_dtype_at_rest(four: Ranks) -> None:
    """1 and 1/1024 on each of four ranks: in the bfloat16 in which it is gathered their sum would be 1."""
    plan = torch_plan(case(LLAMA3, "fsdp", "fsdp=4", settings="tied=true"), dtype="bfloat16")
    results = four.run(tied_sums, plan)
    assert {(dtype, low, high) for dtype, low, high in results} == {
        ("torch.float32", 4 * (1 + 1 / 1024), 4 * (1 + 1 / 1024))
    }


def test_an_update_of_narrow_weights_is_that_of_wide_ones_rounded_once() -> None:
    options = OptimizerOptions(lr=1e-2, warmup=0, steps=4, weight_decay=0.1, clip=0.3)
    weight, cotangent, mu, nu = (
        drawn(64),
        drawn(64, seed=1),
        drawn(64, seed=2, scale=0.1),
        drawn(64, seed=3, scale=0.1).abs(),
    )
    norm = torch.tensor(1.7)
    narrow = [{"w": one.clone()} for one in (weight, cotangent, mu, nu)]
    wide = [{"w": one.float()} for one in (weight, cotangent, mu, nu)]
    for w, g, first, second in (narrow, wide):
        apply_gradients(w, g, {FIRST: first, SECOND: second}, step=3, norm=norm, options=options, decayed=["w"])
    for what, ours, theirs in zip(("weight", "gradient", "first", "second"), narrow, wide, strict=True):
        # A gradient is clipped in its place, if that is wide enough.
        if what != "gradient":
            assert torch.equal(ours["w"], theirs["w"].to(torch.bfloat16)), what


def test_a_mean_is_over_the_tokens_that_there_are() -> None:
    """bfloat16 has no 257, nor any odd number above 256."""
    assert mean_of(torch.tensor(256.0, dtype=torch.bfloat16), torch.tensor(257.0)) == torch.tensor(256 / 257).bfloat16()

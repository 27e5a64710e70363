"""Weights that are gathered as codes and scales: the same codes as those that are quantized after they were gathered.

Losses are equal to the bit. Gradients are summed over ranks in another group of weights, and a sum of four may be in another order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.quantization.delayed import FACTOR, HISTORY
from tests.engine_jax.program import Program
from tests.engine_jax.steps import OPTIONS, Case, batches_of, compiled_step, in_row_order, plan_of, run_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled, in_words, torch_plan, trained
from tests.engine_torch.training import COMPARED_STEPS, kept_after
from tests.matrix import rest, some
from tests.sameness.bounds import EVERY_EXPERT
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

CODES = " gather_quantized=1"
ORDER_OF_SUMS = 4 * 2.0**-23
"""The most that a sum of four float32 may differ in another order, relative to the largest: three roundings of partial sums, each
at most four times as large."""

BLOCKS, ALL = ("mxfp8", "fp8-block"), ("fp8-row", "fp8-current", "fp8-row high_layers=1", "fp8-delayed")
LAYOUTS = {
    (LLAMA3, "hsdp", "data=2,fsdp=2"): (*BLOCKS, *ALL),
    (LLAMA3, "fsdp-tp", "fsdp=2,tensor=2"): ("mxfp8", *ALL),
    (MIXTRAL, "ep-as-cp", "fsdp=2,expert=2"): ALL,
    (MIXTRAL, "ep", "fsdp=2,expert=2"): ALL,
    (DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2"): ALL,
}
"""In the others shards of such small models end inside blocks."""


def quantizing(model: str, layout: str, mesh: str, precision: str) -> Case:
    one = case(model, layout, mesh, settings=EVERY_EXPERT.get(model, ""))
    return replace(one, precision=precision, microbatches=1)


CASES = [quantizing(*layout, name) for layout, names in LAYOUTS.items() for name in names]


DELAYED = [
    quantizing(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", "fp8-delayed high_layers=1"),
    quantizing(MIXTRAL, "ep", "fsdp=2,expert=2", "fp8-delayed amax_history_len=2"),
]


STAGED = replace(quantizing(LLAMA3, "pp", "stage=2,fsdp=2", "fp8-delayed"), microbatches=2)


def of_codes(case: Case) -> Case:
    return replace(case, precision=case.precision + CODES)


@pytest.mark.parametrize("case", [*some(CASES, {6, 12}), rest(STAGED)], ids=in_words)
def test_a_layout_trains_as_with_weights_that_are_quantized_after_their_gather(case: Case, four: Ranks) -> None:
    dense, coded = trained(four, case).run, trained(four, of_codes(case)).run
    np.testing.assert_array_equal(coded.losses, dense.losses)
    for name, gradient in dense.gradients[0].items():
        apart = np.abs(coded.gradients[0][name] - gradient).max()
        assert apart <= ORDER_OF_SUMS * np.abs(gradient).max(), name


@pytest.mark.parametrize("case", some(DELAYED, {1}), ids=in_words)
def test_factors_and_histories_are_those_of_weights_that_are_quantized_after_their_gather(
    case: Case, four: Ranks
) -> None:
    """Sums of two ranks have one order only. A rank computes with experts of which others have some at rest."""
    dense, coded = (delayed_state(four, one) for one in (case, of_codes(case)))
    assert dense.keys() == coded.keys() >= {f"{HISTORY}layers.attention.o.weight"}
    for name, array in dense.items():
        np.testing.assert_array_equal(coded[name], array, err_msg=name)
        assert np.count_nonzero(array) >= array.shape[0], name


def delayed_state(ranks: Ranks, case: Case) -> dict[str, np.ndarray]:
    plan = torch_plan(case)
    batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case, 3)]
    runs = ranks.run(kept_after, plan, case.seed, OPTIONS, batches)
    state = assembled([after for _, after in runs])
    return {name: array for name, array in state.items() if name.startswith((FACTOR, HISTORY))}


@pytest.mark.parametrize("case", [*some(CASES, {10}), rest(STAGED)], ids=in_words)
def test_a_layout_of_jax_does_too(case: Case) -> None:
    dense, coded = run_of(case, COMPARED_STEPS), run_of(of_codes(case), COMPARED_STEPS)
    np.testing.assert_array_equal(coded.losses, dense.losses)
    np.testing.assert_array_equal(coded.norms, dense.norms)


@pytest.mark.parametrize("case", some(CASES, {6}), ids=in_words)
def test_a_program_of_jax_gathers_the_codes_and_scales_of_the_plan(case: Case) -> None:
    """Compared by tensor. XLA's CPU programs send FP8 as float16."""
    case = of_codes(case)
    plan = plan_of(case)
    sent, planned = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for one in Program(compiled_step(case).as_text()).collectives(plan.mesh):
        if one.kind == "all-gather" and one.dtypes in (("float16",), ("uint8",)):
            sent[one.dtypes] += one.bytes_per_device * one.count_per_step
    for row in plan.collectives:
        if row.kind == "all-gather" and row.dtype is not None and row.dtype != "float32":
            narrow = row.dtype.startswith("float8")
            planned["float16" if narrow else row.dtype,] += row.bytes_per_device * row.count_per_step * (1 + narrow)
    assert sent == planned
    assert planned["float16",]

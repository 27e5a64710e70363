"""Tokens that are sent to their experts as codes and scales. Scales are powers of two, so that products quantize the values to the same
values again: only the gradients of the experts' matrices are other ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_jax.program import Program
from tests.engine_jax.steps import Case, Run, compiled_step, plan_of, run_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import in_words, trained
from tests.matrix import some
from tests.sameness.bounds import EVERY_EXPERT
from tests.sameness.cases import DEEPSEEK3, MIXTRAL, case

SENT = " dispatch_quantized=1"
EP = {
    (MIXTRAL, "ep", "fsdp=2,expert=2", ""): ("mxfp8", "fp8-row", "mxfp8 high_layers=1"),
    (MIXTRAL, "ep", "fsdp=2,expert=2", "moe=ring"): ("mxfp8", "fp8-row"),
    (MIXTRAL, "ep", "fsdp=2,expert=2", "moe=weights"): ("fp8-row",),
    (DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2", ""): ("fp8-row",),
    (MIXTRAL, "ep-nodes", "fsdp=1,node=2,expert=2", ""): ("mxfp8",),
}
OF_EXPERTS = ("moe.gate", "moe.up", "moe.down")


def dispatching(model: str, layout: str, mesh: str, move: str, precision: str) -> Case:
    one = case(model, layout, mesh, move=move, settings=EVERY_EXPERT[model])
    return replace(one, precision=precision, microbatches=1)


CASES = [dispatching(*layout, name) for layout, names in EP.items() for name in names]


def sent(case: Case) -> Case:
    return replace(case, precision=case.precision + SENT)


def assert_only_the_matrices_of_experts_differ(plain: Run, coded: Run) -> None:
    assert coded.losses[0] == plain.losses[0]
    differ = {name for name, one in plain.gradients[0].items() if not np.array_equal(coded.gradients[0][name], one)}
    assert differ == {name for name in plain.gradients[0] if name.endswith(OF_EXPERTS)}


@pytest.mark.parametrize("case", some(CASES, {0}), ids=in_words)
def test_ranks_multiply_what_they_would_without_it(case: Case, four: Ranks) -> None:
    plain, coded = (trained(four, one, 1).run for one in (case, sent(case)))
    assert_only_the_matrices_of_experts_differ(plain, coded)


@pytest.mark.parametrize("case", some(CASES, ()), ids=in_words)
def test_devices_of_jax_do_too(case: Case) -> None:
    assert_only_the_matrices_of_experts_differ(*(run_of(one, 1) for one in (case, sent(case))))


@pytest.mark.parametrize("case", some(CASES[:3], {0}), ids=in_words)
def test_a_program_of_jax_sends_the_codes_and_scales_of_the_plan(case: Case) -> None:
    """Every token goes to all experts, so that the chunks of XLA's CPU programs are what is sent. They send FP8 as float16."""
    plan = plan_of(sent(case))
    found, planned = Counter[tuple[str, str | None]](), Counter[tuple[str, str | None]]()
    for one in Program(compiled_step(sent(case)).as_text() or "").collectives(plan.mesh):
        if one.kind == "all-to-all":
            found[one.dtypes[0], one.phase] += one.bytes_per_device * one.count_per_step
    for row in plan.collectives:
        if row.kind == "all-to-all":
            narrow = row.dtype is not None and row.dtype.startswith("float8")
            dtype = "float16" if narrow else row.dtype or plan.request.dtype
            planned[dtype, row.phase] += row.bytes_per_device * row.count_per_step * (1 + narrow)
    assert found == planned
    assert {phase for dtype, phase in planned if dtype == "float16"} == {"forward", "recompute", "backward"}

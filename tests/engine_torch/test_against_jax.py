"""PyTorch on four ranks trains as JAX on one device, from the same seed and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
import pytest

from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import initial_state
from shardwright.engine_jax.training.step import batch_sharding
from shardwright.training.optimizer import FIRST, SECOND
from tests.engine_jax.steps import FEW_STEPS, OPTIONS, Case, assert_same, batches_of, compile_plan, plan_of, run_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import in_words, trained
from tests.engine_torch.training import train
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case, policies

DENSE = (("hsdp", "data=2,fsdp=2"), ("fsdp-tp", "fsdp=2,tensor=2"), ("cp", "fsdp=2,context=2"))
OF_EXPERTS = (*DENSE, ("ep", "fsdp=2,expert=2"), ("ep-as-cp", "fsdp=2,expert=2"))
CASES = [
    case(model, layout, mesh)
    for model, layouts in ((LLAMA3, DENSE), (MIXTRAL, OF_EXPERTS), (DEEPSEEK3, OF_EXPERTS))
    for layout, mesh in layouts
]
CASES.append(
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2", "attention=ring,moe=ring", "capacity_factor=1.0", balanced=True)
)
EACH_LAYOUT = [*CASES[::2], CASES[-1]]
"""Each layout with one family or two; ``whole.py`` trains all steps of every case. `make test` compares each family, and dense layers,
experts and a ring; other layouts it compares with one device of this engine, in ``test_layouts_agree.py``."""

WITH_POLICIES = list(policies())
CASES += WITH_POLICIES

SHARDED_UPDATES = [
    case(LLAMA3, "zero1", "data=4"),
    case(LLAMA3, "zero2", "data=4", settings="tied=true"),
    case(LLAMA3, "hsdp-zero2", "data=2,fsdp=2"),
    case(MIXTRAL, "zero-ep", "data=2,fsdp=1,expert=2"),
]
LOSSES = [
    replace(case(LLAMA3, "fsdp", "fsdp=4"), loss_chunks=8),
    replace(case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings="tied=true"), loss_chunks=2),
]
"""`make test` compares sharded updates, and losses in chunks, with one device of this engine, in ``test_layouts_agree.py``."""
CASES += SHARDED_UPDATES + LOSSES


@pytest.mark.parametrize("case", [*some(EACH_LAYOUT, (0, 3, 6, 7)), *some(WITH_POLICIES, (4, 8))], ids=in_words)
def test_trains_as_the_other_engine(case: Case, four: Ranks) -> None:
    """From bitwise equal weights: the gradients of steps 1 and 2, every loss, and the gradient norms for clipping."""
    ours, theirs = trained(four, case, FEW_STEPS), run_of(case.alone)
    assert_same_bits(ours.initial, case)
    assert_same(ours.run, theirs, case.tolerance)
    np.testing.assert_allclose(ours.run.norms, theirs.norms, rtol=1e-3)


def test_overflow_is_counted_as_on_the_other_engine(four: Ranks) -> None:
    """JAX omits the assignments that overflow a buffer, PyTorch processes them; both report their number."""
    # One layer only: after omitted assignments, the next layer's router would choose other experts.
    small = case(MIXTRAL, "ep", "fsdp=2,expert=2", settings="num_layers=1")
    request = replace(plan_of(small).request, expert_buffer=1.0)
    (batch,) = batches_of(small, 1)
    plan = make_plan(request)
    step = compile_plan(plan)
    placed = jax.device_put(dict(batch), batch_sharding(plan, device_mesh(plan.mesh)))
    _, theirs = step(initial_state(plan, device_mesh(plan.mesh), small.seed), placed)
    results = four.run(train, make_plan(replace(request, engine="torch")), small.seed, OPTIONS, [batch])
    assert [one.steps[0].overflow for one in results] == [int(theirs.overflow)] * 4
    assert theirs.overflow > 0


def assert_same_bits(ours: Mapping[str, np.ndarray], case: Case) -> None:
    """The state before the first step is bitwise equal to that of the JAX engine."""
    alone = plan_of(case.alone)
    state = initial_state(alone, device_mesh(alone.mesh), case.seed)
    theirs = {
        **state.weights,
        **state.buffers,
        **{FIRST + name: array for name, array in state.first.items()},
        **{SECOND + name: array for name, array in state.second.items()},
    }
    assert ours.keys() == theirs.keys()
    for name, array in jax.device_get(theirs).items():
        assert array.dtype == ours[name].dtype == np.float32
        np.testing.assert_array_equal(ours[name].view(np.int32), array.view(np.int32), err_msg=name)

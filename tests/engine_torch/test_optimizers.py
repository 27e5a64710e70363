"""What an optimizer and an average keep on four ranks is what they keep on one: of a table's optimizer, and of PyTorch's own."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.core.model.optimizer import Optimizer
from shardwright.engine_torch.training.named_optimizer import described
from shardwright.training.optimizers import optimizer_of
from tests.engine_jax.steps import OPTIONS, Case, batches_of, in_row_order
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled, torch_plan
from tests.engine_torch.training import kept_after
from tests.matrix import rest
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

STEPS = 3
CASES = [
    (case(DEEPSEEK3, "ep", "fsdp=2,expert=2", settings="num_layers=2"), "torch:NAdam"),
    (case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2"), "sgd"),
    (case(MIXTRAL, "hsdp", "data=2,fsdp=2"), "adamax"),
    (case(LLAMA3, "fsdp", "fsdp=4", settings="vocab=257"), "torch:ASGD"),
]


@pytest.mark.parametrize(("case", "name"), [CASES[0], *(rest(*one) for one in CASES[1:])])
def test_four_ranks_keep_what_one_keeps(case: Case, name: str, four: Ranks, one: Ranks) -> None:
    ours, theirs = state_after(four, case, name), state_after(one, case.alone, name)
    assert ours.keys() == theirs.keys()
    prefixes = {key.rpartition("/")[0] for key in ours}
    assert len(prefixes) >= 3
    for key, (before, after) in ours.items():
        moved = np.linalg.norm(after - before) + 1e-12
        assert np.linalg.norm(after - theirs[key][1]) <= 1e-2 * moved, key


def state_after(ranks: Ranks, case: Case, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The full state before the first step, where there is some, and after the last, by the names of a checkpoint."""
    plan = torch_plan(case)
    plan = torch_plan(case, optimizer=_optimizer(name, plan.request.table), average=0.6)
    batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case)[:STEPS]]
    results = ranks.run(kept_after, plan, case.seed, OPTIONS, batches)
    before, after = (assembled([found[number] for found in results]) for number in (0, 1))
    return {key: (before.get(key, np.zeros_like(array)), array) for key, array in after.items()}


def _optimizer(name: str, table) -> Optimizer:
    library, _, short = name.rpartition(":")
    if not library:
        return optimizer_of(name, {})
    shapes = {w.name: (w.num, *w.shape) if w.stack else w.shape for w in table.weights if not w.frozen}
    return described(short, {}, shapes)

"""A user's own module whose weights are loaded, moved, tied, frozen and replaced, and ranks that use them in another order."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.engine_torch.own_program.module import parallelize
from tests.engine_torch import own_changes
from tests.engine_torch.own_block import CPU, VOCAB
from tests.engine_torch.own_changes import CHANGES, LAYOUTS, Drawn, checked, loss_of, made, planned
from tests.engine_torch.ranks import Ranks
from tests.matrix import rest

SEEDS = range(8)


def lines(ranks: Ranks, cases: list[Drawn]) -> list[list[str]]:
    return [list(answers) for answers in zip(*ranks.run(all_checked, cases), strict=True)]


def all_checked(cases: list[Drawn]) -> list[str]:
    return [checked(case) for case in cases]


def test_random_changes_train_as_one_process_or_are_refused(four: Ranks) -> None:
    counts, wrong = own_changes.by_outcome(four, SEEDS)
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] >= len(SEEDS) // 3, counts


@pytest.mark.parametrize("first", [rest(number) for number in range(100, 400, 100)])
def test_more_random_changes(four: Ranks, first: int) -> None:
    _, wrong = own_changes.by_outcome(four, range(first, first + 100))
    assert not wrong, "\n".join(wrong)


def test_every_change_of_a_weight_that_no_rank_gathers(four: Ranks) -> None:
    """What ``ddp`` replicates may be changed in every way, also in a module that is made on meta."""
    changes = tuple((change, "gains.second") for change in CHANGES if change not in ("adapt", "untie"))
    cases = [Drawn(layout="ddp", tied=False, on_meta=True, changes=changes)]
    cases += [Drawn(layout=layout, tied=False, on_meta=True, changes=()) for layout in LAYOUTS if layout != "ddp"]
    for case, answers in zip(cases, lines(four, cases), strict=True):
        assert answers == ["equal"] * 4, str(case)


def with_training_method() -> tuple[float, float]:
    """How far gradients are off where a program calls parts of its module alone, and where it compiles the module: after its weights were
    replaced, in a process of its own."""
    worst = []
    for compiled in (False, True):
        plan, alone = planned("ddp", tied=False), made("ddp", tied=False)
        module = made("ddp", tied=False)
        parallelize(module, plan, device=CPU)
        module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()}, assign=True)
        batch = torch.randint(VOCAB, (8, 6), generator=torch.Generator().manual_seed(2))
        rows = batch.chunk(4)[dist.get_rank()]
        if compiled:
            called = torch.compile(module, backend="eager")
            with warnings.catch_warnings():
                # PyTorch's own, of what it traces.
                warnings.simplefilter("ignore")
                loss_of(called, rows, 0, uses=False).backward()
        else:
            x = module.tokens(rows[:, :-1])
            for block in module.blocks:
                x = block(x)
            logits = module.head(module.gains(module.norm(x)))
            nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        loss_of(alone, batch, 0, uses=False).backward()
        pairs = zip(module.parameters(), alone.parameters(), strict=True)
        worst.append(max((one.grad - other.grad).abs().max().item() for one, other in pairs))
    return worst[0], worst[1]


def test_parts_of_a_module_and_a_compiled_one(four: Ranks) -> None:
    assert max(max(answer) for answer in four.run(with_training_method)) < 1e-6

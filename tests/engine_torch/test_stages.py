"""Models in stages compared with one device: every schedule, uneven stages, every parallelism inside, tied embeddings.

Rows have unequal numbers of valid tokens, every step is clipped, and replicas must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import OwnedBox, commit, saving, write_part
from shardwright.engine_torch.training.state import tensors_of
from tests.checkpoint.states import point
from tests.engine_jax.steps import OPTIONS, assert_same, batches_of
from tests.engine_torch import faults
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RanksRun, RunAlone, assembled, torch_plan, trained_on
from tests.engine_torch.staged import Staged, plan_in_stages
from tests.engine_torch.training import COMPARED_STEPS, kept_after, loaded
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

TIED = "tied=true"

CASES = (
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="1f1b"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="zbv", stages="E|t|t|L"),
    Staged(model=MIXTRAL, mesh="stage=2,fsdp=1,expert=2", microbatches=2, schedule="gpipe", inside="ep"),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="interleaved",
        stages="Et|t|t|L",
        inside="ep-as-cp",
    ),
    Staged(model=DEEPSEEK3, mesh="stage=3,fsdp=1", microbatches=8, schedule="zero-bubble", stages="Et|tt|L"),
    Staged(model=LLAMA3, mesh="stage=2,data=2,fsdp=1", microbatches=4, schedule="1f1b", inside="hsdp", settings=TIED),
    Staged(
        model=LLAMA3,
        mesh="stage=2,fsdp=1,tensor=2",
        microbatches=4,
        schedule="dualpipev",
        stages="E|t|t|L",
        inside="tp",
        remat="none",
    ),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="zbv", stages="E|t|t|L", settings=TIED),
    Staged(model=LLAMA3, mesh="stage=4,fsdp=1", microbatches=8, schedule="1f1b", stages="E|t|t|L"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=1, schedule="gpipe", remat="none"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="looped-bfs", stages="E|t|t|L", remat="dots"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="zero-bubble", remat="none", settings=TIED),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=1,context=2", microbatches=4, schedule="1f1b", inside="cp", move="ring"),
    Staged(
        model=LLAMA3, mesh="stage=2,fsdp=1,context=2", microbatches=8, schedule="zbv", stages="E|t|t|L", inside="cp"
    ),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=1,tensor=2", microbatches=2, schedule="gpipe", inside="tp-whole-rows"),
    Staged(model=LLAMA3, mesh="stage=2,data=2,fsdp=1", microbatches=4, schedule="zero-bubble", inside="hsdp"),
    Staged(model=MIXTRAL, mesh="stage=4,fsdp=1", microbatches=4, schedule="zero-bubble", stages="E|t|t|L"),
    Staged(
        model=MIXTRAL,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="zbv",
        stages="E|t|t|L",
        inside="ep-as-cp",
        remat="none",
    ),
    Staged(model=MIXTRAL, mesh="stage=2,fsdp=2", microbatches=4, schedule="interleaved", stages="E|t|t|L"),
    Staged(model=DEEPSEEK3, mesh="stage=2,fsdp=1,expert=2", microbatches=2, schedule="1f1b", inside="ep"),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="dualpipev",
        stages="Et|t|t|L",
        inside="ep-as-cp",
    ),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,tensor=2",
        microbatches=3,
        schedule="1f1b",
        inside="tp",
        stages="Et|ttL",
        rows=6,
    ),
    Staged(model=DEEPSEEK3, mesh="stage=2,fsdp=1,context=2", microbatches=4, schedule="1f1b", inside="cp", move="ring"),
    # Updates that an axis shards beside stages.
    Staged(model=LLAMA3, mesh="stage=2,data=2,fsdp=1", microbatches=4, schedule="zero-bubble", inside="zero1"),
    Staged(model=LLAMA3, mesh="stage=2,data=2,fsdp=1", microbatches=4, schedule="1f1b", inside="zero1", settings=TIED),
    Staged(
        model=LLAMA3,
        mesh="stage=2,data=2,fsdp=2",
        microbatches=4,
        schedule="zbv",
        stages="E|t|t|L",
        inside="zero1",
        rows=16,
    ),
)
# Ends that all stages share.
DEEP = "num_layers=4"
SHARED_ENDS = (
    Staged(
        model=LLAMA3,
        mesh="stage=2,fsdp=2",
        microbatches=4,
        schedule="1f1b",
        ends="embedding: fsdp, logits: tensor",
        rows=16,
    ),
    Staged(
        model=LLAMA3,
        mesh="stage=4,fsdp=1",
        microbatches=4,
        schedule="zero-bubble",
        ends="logits: tensor",
        settings=DEEP,
    ),
    Staged(
        model=LLAMA3,
        mesh="stage=2,data=2,fsdp=1",
        microbatches=4,
        schedule="zbv",
        stages="t|t|t|t",
        inside="hsdp",
        ends="embedding: tensor, logits: tensor",
        settings=f"{DEEP},{TIED}",
    ),
    Staged(
        model=LLAMA3,
        mesh="stage=2,fsdp=1,tensor=2",
        microbatches=2,
        schedule="interleaved",
        stages="t|t|t|t",
        inside="tp",
        ends="embedding: tensor, logits: fsdp",
        settings=DEEP,
        rows=16,
    ),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="1f1b",
        inside="ep-as-cp",
        ends="embedding: data, logits: tensor",
        stages="tt|t",
        rows=16,
    ),
)
# Three and four stages beside fsdp, one and two of each rank; experts and tensor at once.
EVERY_FAMILY = (
    Staged(
        model=LLAMA3,
        mesh="stage=3,fsdp=2",
        microbatches=6,
        schedule="interleaved",
        stages="E|tt|t|t|t|L",
        settings="num_layers=5",
        rows=12,
    ),
    Staged(
        model=LLAMA3,
        mesh="stage=4,fsdp=2",
        microbatches=8,
        schedule="dualpipev",
        stages="E|(t|)*6L",
        settings="num_layers=6",
        rows=16,
    ),
    Staged(
        model=MIXTRAL,
        mesh="stage=3,fsdp=2",
        microbatches=6,
        schedule="1f1b",
        stages="Ett|t|tL",
        settings="num_layers=4",
        rows=12,
    ),
    Staged(model=MIXTRAL, mesh="stage=2,fsdp=1,expert=2,tensor=2", microbatches=2, schedule="1f1b", inside="ep-tp"),
    Staged(model=DEEPSEEK3, mesh="stage=4,fsdp=2", microbatches=4, schedule="gpipe", stages="Et|t|t|L"),
)
# Numbers of microbatches that nothing divides, and two stages a rank beside each kind of axis.
MORE = (
    Staged(model=LLAMA3, mesh="stage=2,fsdp=1", microbatches=5, schedule="1f1b", rows=5),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=1", microbatches=7, schedule="zbv", stages="E|t|t|L", rows=7),
    Staged(
        model=MIXTRAL, mesh="stage=2,fsdp=1,context=2", microbatches=8, schedule="zbv", stages="E|t|t|L", inside="cp"
    ),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,data=2,fsdp=1",
        microbatches=4,
        schedule="looped-bfs",
        stages="E|tt|t|L",
        inside="hsdp",
    ),
    Staged(
        model=DEEPSEEK3, mesh="stage=2,fsdp=1,tensor=2", microbatches=4, schedule="zbv", stages="E|t|t|tL", inside="tp"
    ),
)
OF_ONE_GRAPH = (
    Staged(model=MIXTRAL, mesh="stage=2,fsdp=2", microbatches=4, schedule="zero-bubble", remat="none"),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="dualpipev",
        stages="Et|t|t|L",
        inside="ep",
        remat="none",
    ),
    Staged(
        model=LLAMA3, mesh="stage=2,fsdp=1,tensor=2", microbatches=4, schedule="zero-bubble", inside="tp", remat="none"
    ),
)
"""A divided backward pass of stages that compute nothing again: experts, and what axes inside of a stage send."""
CASES += (*EVERY_FAMILY, *MORE, *SHARED_ENDS, *OF_ONE_GRAPH)
COVERING = (0, 1, 2, 3, 4, 5, 6, len(CASES) - len(SHARED_ENDS) - len(OF_ONE_GRAPH))


def in_stages(case: Staged, eight: Ranks, fault: str = "") -> RanksRun:
    plan, alone = plan_in_stages(case), case.alone
    batches = batches_of(alone, COMPARED_STEPS)
    return trained_on(eight.first(case.num_ranks), plan, batches, alone.seed, fault, checked=not fault)


def assert_trained_alike(ours: RanksRun, theirs: RanksRun, tolerance: float) -> None:
    assert_same(ours.run, theirs.run, tolerance)
    np.testing.assert_allclose(ours.run.norms, theirs.run.norms, rtol=tolerance, err_msg="norms off by")


@pytest.mark.parametrize("case", some(CASES, COVERING), ids=str)
def test_trains_as_one_device(case: Staged, eight: Ranks, run_alone: RunAlone) -> None:
    ours, theirs = in_stages(case, eight), run_alone(case.alone)
    assert_trained_alike(ours, theirs, case.alone.tolerance)
    assert ours.initial.keys() == theirs.initial.keys()
    assert all((ours.initial[name] == theirs.initial[name]).all() for name in ours.initial)


SMALL = "num_layers=2,embed=64,mlp=128,num_heads=4,num_kv_heads=4"
HALVES = Staged(
    model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="zero-bubble", settings=SMALL, remat="none"
)
TWO = Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="1f1b", settings=SMALL)
TIED_ENDS = replace(TWO, settings=f"{SMALL},{TIED}")

IN_CHUNKS = [
    replace(TIED_ENDS, schedule="zbv", stages="E|t|t|L", loss_chunks=8),
    replace(TWO, schedule="gpipe", mesh="stage=2,fsdp=1,tensor=2", inside="tp", loss_chunks=4),
]


@pytest.mark.parametrize("case", some(IN_CHUNKS, {0}), ids=str)
def test_the_loss_in_chunks_changes_nothing(case: Staged, eight: Ranks, run_alone: RunAlone) -> None:
    assert_trained_alike(in_stages(case, eight), run_alone(case.alone), case.alone.tolerance)


FAULTS = [
    (HALVES, faults.weights_freed_between_halves),
    (TWO, faults.loss_normalised_by_each_microbatch),
    (TWO, faults.norm_of_own_stages),
    (TIED_ENDS, faults.tied_gradients_not_summed),
    (TIED_ENDS, faults.a_tied_weight_counted_twice),
]


@pytest.mark.parametrize(("case", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_a_silent_error_of_stages_is_detected(
    case: Staged, fault: Callable[[pytest.MonkeyPatch], None], eight: Ranks, run_alone: RunAlone
) -> None:
    """Each of these trains, without a message, with the loss of one device in the first step."""
    theirs = run_alone(case.alone)
    ours = in_stages(case, eight, fault.__name__)
    with pytest.raises(AssertionError, match="off by"):
        assert_trained_alike(ours, theirs, case.alone.tolerance)


SAVED = Staged(
    model=LLAMA3,
    mesh="stage=2,fsdp=2",
    microbatches=4,
    schedule="zbv",
    stages="E|t|t|L",
    settings=SMALL,
    recipe="fp8-delayed",
)
LOADED = (
    replace(SAVED, mesh="stage=4,fsdp=1", schedule="1f1b"),
    replace(SAVED, mesh="stage=2,fsdp=1", microbatches=2, schedule="gpipe", stages="E|ttL"),
    replace(SAVED, mesh="stage=2,data=2,fsdp=1", schedule="1f1b", stages=None, inside="zero1"),
    replace(SAVED, schedule="1f1b", stages=None, ends="embedding: tensor, logits: tensor"),
)


def test_a_checkpoint_of_stages_loads_with_others_and_without(eight: Ranks, tmp_path: Path) -> None:
    """After a step, all that a run keeps: each element saved once, and found again by every other layout."""
    plan, alone = plan_in_stages(SAVED), SAVED.alone
    [batch] = batches_of(alone, 1)
    ranks = eight.first(SAVED.num_ranks).run(kept_after, plan, alone.seed, OPTIONS, [dict(batch)])
    after = [boxes for _, boxes in ranks]
    with saving(tmp_path, 1) as begun:
        for rank, boxes in enumerate(after):
            owned = [OwnedBox(name=name, box=box, array=array) for name, box, array in boxes]
            write_part(begun, tensors_of(plan), owned, process=rank)
        folder = commit(begun, point(step=1), num_processes=len(after))
    saved = assembled(after)
    for other in (*map(plan_in_stages, LOADED), plan, torch_plan(alone, precision=plan.request.precision)):
        found = assembled(eight.first(other.mesh.num_devices).run(loaded, other, folder))
        assert found.keys() == saved.keys()
        assert [name for name in saved if not np.array_equal(found[name], saved[name])] == []

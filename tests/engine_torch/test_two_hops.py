"""Tokens that go to their experts by way of nodes, compared with one rank: numbers, and what each rank sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright.core.mesh.mesh import Mesh
from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, assert_trains_as, in_words
from tests.engine_torch.staged import Staged
from tests.engine_torch.test_stages import assert_trained_alike, in_stages
from tests.engine_torch.two_hops import directly, drawn, outputs_in_two_hops, sent_by
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, MIXTRAL, case

SEEDS = range(12)

ON_FOUR = [
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=2,expert=2"),
    case(MIXTRAL, "ep-nodes", "fsdp=1,node=2,expert=2", settings="capacity_factor=1.0"),
    case(MIXTRAL, "ep-nodes-as-cp", "fsdp=1,node=2,expert=2", settings="capacity_factor=0.5", balanced=True),
    case(DEEPSEEK3, "ep-nodes-as-cp", "fsdp=1,node=2,expert=2", settings="top_k=2,num_groups=8,num_chosen_groups=3"),
]
ON_EIGHT = [
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=4,expert=2"),
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=2,expert=4", settings="capacity_factor=1.0"),
    case(MIXTRAL, "ep-nodes-tp", "node=2,expert=2,tensor=2"),
    case(DEEPSEEK3, "ep-nodes", "fsdp=2,node=2,expert=2", settings="top_k=8,num_groups=1,num_chosen_groups=1"),
]


@pytest.mark.parametrize("case", some(ON_FOUR, (2,)), ids=in_words)
def test_four_ranks_train_as_one_device(case: Case, four: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), four, case)


@pytest.mark.parametrize("case", some(ON_EIGHT, (0,)), ids=in_words)
def test_eight_ranks_train_as_one_device(case: Case, eight: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), eight, case)


@pytest.mark.matrix
@pytest.mark.parametrize("remat", ["full", "keep=moe.dispatched,host=router.returned", "none"])
def test_policies_keep_what_a_node_sends_on(remat: str, four: Ranks, run_alone: RunAlone) -> None:
    one = replace(ON_FOUR[0], remat=remat)
    assert_trains_as(run_alone(one.alone), four, one)


@pytest.mark.matrix
def test_stages_train_as_one_device(eight: Ranks, run_alone: RunAlone) -> None:
    staged = Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,node=2,expert=2",
        microbatches=2,
        schedule="1f1b",
        stages="Ett|tL",
        inside="ep-nodes",
    )
    assert_trained_alike(in_stages(staged, eight), run_alone(staged.alone), staged.alone.tolerance)


@pytest.mark.parametrize("mesh", [Mesh.of(node=2, expert=4), Mesh.of(node=4, expert=2)], ids=str)
def test_drawn_tokens_have_the_outputs_and_gradients_of_one_device(mesh: Mesh, eight: Ranks) -> None:
    """And each rank sends over each axis what the routing says: a token once to each node, an assignment once inside of it."""
    found = eight.run(outputs_in_two_hops, mesh, SEEDS)
    for place, seed in enumerate(SEEDS):
        one = drawn(seed, 8)
        outputs, gradients = directly(one)
        for rank in range(8):
            ours, own = found[rank][place], one.experts // 8
            torch.testing.assert_close(ours.output, outputs[rank], rtol=1e-4, atol=1e-4)
            for name in ("x", "weights"):
                torch.testing.assert_close(ours.gradients[name], gradients[name][rank], rtol=1e-4, atol=1e-4)
            for our, their in zip(ours.gradients["matrices"], gradients["matrices"], strict=True):
                torch.testing.assert_close(our, their[rank * own : (rank + 1) * own], rtol=1e-4, atol=1e-4)
            expected = sent_by(one, rank, mesh)
            assert ours.sent == expected, (seed, rank)
            # Back go the cotangents of tokens and of their weights, and none of the numbers of experts.
            assert ours.back["expert"] == expected["expert"]
    over_nodes = [sum(of_rank[n].sent["node"] for of_rank in found) for n in range(len(SEEDS))]
    assert min(over_nodes) > 0

"""Layouts compared with each other and with one device: HSDP, few rows, every algorithm and setting.

One device is a single rank of this engine, without communication; ``test_against_jax.py`` tests the mathematics itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine_jax.made_rows import head_tail
from tests.engine_jax.steps import FEW_STEPS, Case, assert_same
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, assert_trains_as, in_words, torch_plan, trained
from tests.matrix import rest, some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, SHARED_HEADS, case

FEW = 2
"""Rows of a step, fewer than ranks."""


def few_rows(model: str, layout: str, mesh: str) -> Case:
    return replace(case(model, layout, mesh), rows=FEW, microbatches=1)


def test_hybrid_shards_train_as_full_ones(four: Ranks) -> None:
    """An all-reduce of replicas after the last microbatch gives the sums of a reduce-scatter in each microbatch."""
    hybrid = trained(four, case(LLAMA3, "hsdp", "data=2,fsdp=2"), FEW_STEPS)
    full = trained(four, case(LLAMA3, "fsdp", "fsdp=4"), FEW_STEPS)
    assert_same(hybrid.run, full.run, 1e-5)


ON_FOUR = [
    few_rows(LLAMA3, "tp", "tensor=4"),
    few_rows(LLAMA3, "cp", "fsdp=2,context=2"),
    case(LLAMA3, "ddp", "data=4"),
    case(LLAMA3, "tp", "data=2,tensor=2"),
    # FSDP pads what its ranks do not divide.
    case(LLAMA3, "fsdp", "fsdp=4", settings="mlp=510"),
    replace(case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings="tied=true"), loss_chunks=4),
    case(LLAMA3, "tp-whole-keys", "fsdp=1,tensor=4", settings="num_kv_heads=2"),
    # The six query heads of a rank attend to two KV heads: four to one, two to the other.
    case(LLAMA3, "tp-whole-keys", "fsdp=2,tensor=2", settings="num_heads=12,num_kv_heads=3"),
    # FSDP sums over all ranks of the gather, also over those that compute the same gradient.
    case(LLAMA3, "stored-over-idle", "fsdp=2,spare=2"),
    case(LLAMA3, "stored-over-idle", "fsdp=1,spare=4"),
    case(LLAMA3, "cp", "fsdp=1,context=4", "attention=ring", SHARED_HEADS, balanced=True),
    case(LLAMA3, "cp", "fsdp=2,context=2", "attention=ulysses", SHARED_HEADS),
    case(LLAMA3, "cp", "fsdp=2,context=2", settings=SHARED_HEADS, balanced=True),
    case(DEEPSEEK3, "cp", "fsdp=2,context=2", "attention=ring", balanced=True),
    case(DEEPSEEK3, "cp", "fsdp=2,context=2", "attention=ulysses"),
    case(DEEPSEEK3, "ep-as-dp", "fsdp=2,expert=2"),
    case(DEEPSEEK3, "fsdp-as-dp-for-attn", "fsdp=2,expert=2"),
    # A rule shards the router's kernel over an axis; it would also shard the bias, which is a buffer.
    case(DEEPSEEK3, "stored-by-rule", "fsdp=2,expert=2"),
    case(MIXTRAL, "ep", "fsdp=2,expert=2", "moe=ring"),
    case(MIXTRAL, "ep", "fsdp=2,expert=2", "moe=weights"),
    case(MIXTRAL, "tp-as-ep", "fsdp=2,tensor=2"),
    case(MIXTRAL, "shard-exp-on-fsdp", "fsdp=2,expert=2"),
    case(MIXTRAL, "ep", "fsdp=2,expert=2", settings="capacity_factor=1.0"),
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2", settings="capacity_factor=1.0", balanced=True),
    case(MIXTRAL, "ep-as-cp", "fsdp=1,expert=4", "moe=ring", "capacity_factor=1.0", balanced=True),
    # The update is sharded and the weights are not: after the last microbatch, or in each of them.
    case(LLAMA3, "zero1", "data=4"),
    case(LLAMA3, "hsdp-zero1", "data=2,fsdp=2"),
    case(LLAMA3, "zero2", "data=4", settings="tied=true"),
    # Shards of uneven shards.
    case(LLAMA3, "hsdp-zero2", "data=2,fsdp=2", settings="mlp=510"),
    case(LLAMA3, "zero-tp", "data=2,replica=2,tensor=1"),
    case(LLAMA3, "zero-tp", "data=2,replica=1,tensor=2"),
    case(MIXTRAL, "zero-ep", "data=2,fsdp=1,expert=2"),
    # Weights stay gathered from the forward to the backward pass.
    case(LLAMA3, "kept-tp", "data=1,fsdp=2,tensor=2"),
    case(MIXTRAL, "kept-ep", "fsdp=2,expert=2"),
    # The loss in chunks: of rows, of shards of rows, and as many as tokens.
    case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings="tied=true"),
    replace(case(LLAMA3, "cp", "fsdp=2,context=2", settings=SHARED_HEADS, balanced=True), loss_chunks=4),
    replace(case(LLAMA3, "hsdp", "data=2,fsdp=2"), loss_chunks=32),
    replace(case(LLAMA3, "tp", "data=2,tensor=2"), loss_chunks=8),
    replace(case(DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2"), loss_chunks=4),
    # Fewer experts than ranks: their weights are stored on another dim.
    case(MIXTRAL, "fsdp", "fsdp=4", settings="num_experts=2"),
    case(MIXTRAL, "ep", "fsdp=2,expert=2", settings="num_experts=2"),
    case(MIXTRAL, "zero-ep", "data=2,fsdp=2,expert=1", settings="num_experts=2"),
    case(DEEPSEEK3, "ep-as-cp", "fsdp=4,expert=1", settings="num_experts=2,top_k=2,num_groups=1,num_chosen_groups=1"),
]


@pytest.mark.parametrize(
    "case", some(ON_FOUR, {1, 4, 5, 7, 8, 10, 11, 13, 16, 17, 19, 24, 25, 28, 31, 39, 40}), ids=in_words
)
def test_trains_as_one_device(case: Case, four: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), four, case)


DENSE, EXPERTS = case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2"), case(MIXTRAL, "ep", "fsdp=2,expert=2")

CONTEXT, RING = case(LLAMA3, "cp", "fsdp=2,context=2"), case(LLAMA3, "cp", "fsdp=1,context=4", "attention=ring")
LATENT = case(DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2")


@pytest.mark.parametrize(
    ("case", "remat"),
    [
        (DENSE, "none"),
        (DENSE, "dots@0:1+none"),
        rest(EXPERTS, "none@::2+full"),
        rest(DENSE, "dots"),
        rest(EXPERTS, "none"),
        rest(EXPERTS, "dots"),
        (CONTEXT, "keep=residual.middle,attention.keys_attended,mlp.gate@:1+dots,host=residual.stream"),
        (
            EXPERTS,
            "keep=moe.dispatched,router.scores,host=residual.stream,router.returned@:1+keep=moe.gate,residual.middle",
        ),
        rest(RING, "keep=attention.attended,mlp.gate,host=mlp.up"),
        rest(LATENT, "keep=attention.latent,moe.output,shared.hidden,host=attention.queries"),
    ],
    ids=str,
)
def test_recomputation_changes_nothing(case: Case, remat: str, four: Ranks, run_alone: RunAlone) -> None:
    assert torch_plan(case).request.remat == "full"
    assert_trains_as(run_alone(case.alone), four, case, remat=remat)


def test_a_balanced_row_has_another_order() -> None:
    """Otherwise the balanced cases above would test nothing."""
    plan = torch_plan(case(LLAMA3, "cp", "fsdp=1,context=4", "attention=ring", SHARED_HEADS, balanced=True))
    assert plan.row_chunks == tuple(head_tail(8, 4)) == (0, 7, 1, 6, 2, 5, 3, 4)

"""A user's own module under tensor parallelism, with plain tensors in and out, against one process of the entire batch."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from shardwright import Request, load_layout, make_plan, table_of
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.own_program.module import parallelize, shapes_of
from tests.engine_torch import own_parallel
from tests.engine_torch.own_parallel import CPU, Program, Trained, drawn, local_plan, plan_of, train
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.test_own_module import rank
from tests.matrix import rest

CHOSEN = (1, 2, 5, 7)
"""Attention of each kind, under both layouts. Each takes a second."""


def assert_equal(on_ranks: Trained, needed: Trained, program: Program) -> None:
    np.testing.assert_allclose(on_ranks.losses, needed.losses, rtol=1e-5, err_msg=str(program))
    for part in ("gradients", "weights"):
        of_ranks, of_one = getattr(on_ranks, part), getattr(needed, part)
        assert of_ranks.keys() == of_one.keys()
        for name, value in of_one.items():
            np.testing.assert_allclose(
                of_ranks[name], value, rtol=1e-4, atol=2e-6, err_msg=f"{part} of {name}: {program}"
            )


@pytest.mark.parametrize("seed", [rest(seed) if seed not in CHOSEN else seed for seed in range(60)])
def test_drawn_programs_train_as_one_process(four: Ranks, seed: int) -> None:
    program = drawn(seed)
    alone = train(program, None)
    for answer in four.run(own_parallel.train, program, plan_of(program)):
        assert_equal(answer, alone, program)


def test_a_module_may_take_its_own_shards_and_copies_and_errors_change_nothing(four: Ranks) -> None:
    for error, of_copy, sharded, outside in four.first(2).run(
        own_parallel.surroundings, local_plan("tp", {"data": 1, "tensor": 2})
    ):
        assert max(error, of_copy) < 1e-5
        assert sharded
        assert outside


def test_a_module_that_is_called_without_its_unit(four: Ranks) -> None:
    plan = local_plan("fsdp-tp", {"data": 1, "fsdp": 2, "tensor": 2})
    assert (
        four.run(own_parallel.called_alone, plan)
        == [
            "'weight' is sharded over fsdp in a forward pass: FSDP gathers it when the module is called that it was given as a unit. Call "
            "that one, or choose others with `units`."
        ]
        * 4
    )


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (
            6,
            {},
            "'in_proj_weight' is sharded by tensor, of 4 ranks, which do not divide the 6 heads of its nn.MultiheadAttention. Use a number "
            "of ranks that divides them.",
        ),
        (
            4,
            {"add_zero_attn": True},
            "'in_proj_weight' is sharded by tensor in use, and its nn.MultiheadAttention has add_bias_kv or add_zero_attn, which are of no "
            "head. Leave them out, or describe its weights as 'attention: embed_out embed', which are not sharded in use.",
        ),
    ],
)
def test_an_attention_that_has_no_equal_heads(heads: int, options: dict[str, bool], message: str) -> None:
    module = nn.MultiheadAttention(8 * heads, heads, bias=False, **options)
    names = {"in_proj_weight": "attention: heads embed", "out_proj.weight": "attention: embed heads"}
    # With units of half a head, the plan has shards of equal size.
    table = table_of(shapes_of(module), names, units={"heads": 4})
    layout = load_layout("tp")
    plan = make_plan(
        Request(layout=layout, table=table, mesh_sizes={"data": 1, "tensor": 4}, batch=4, length=4, engine="torch")
    )
    with rank(0, 4), pytest.raises(InputError) as caught:
        parallelize(module, plan, device=CPU)
    assert str(caught.value) == message

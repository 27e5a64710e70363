"""A user's own module whose weights are loaded, moved, tied, frozen and replaced, and ranks that use them in another order."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import clip_grad_norm_, parameter_groups
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.own_program.module import parallelize
from tests.engine_torch import own_changes
from tests.engine_torch.own_block import CPU, VOCAB, plan_of
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


def diverged(layout: str, name: str, steps: int) -> str:
    """The message on a rank whose replica of a weight another rank updates otherwise, or makes of other values."""
    module = made(layout, tied=False)
    parallelize(module, planned(layout, tied=False), device=CPU)
    batch = torch.randint(VOCAB, (8, 6), generator=torch.Generator().manual_seed(2))
    for number in range(3):
        if number == steps and dist.get_rank() == 3:
            with torch.no_grad():
                local_of(module.get_parameter(name)).view(-1)[0] += 1e-6
        try:
            # Two passes for each update.
            for rows in batch.chunk(2):
                loss_of(module, rows.chunk(4)[dist.get_rank()], 0, uses=False).backward()
        except InputError as error:
            return str(error)
        own_changes.step(module)
    return ""


@pytest.mark.parametrize(
    ("layout", "name", "steps", "message"),
    [
        (
            "ddp",
            "gains.scale",
            0,
            "weight 'gains.scale' must be the same on ranks 0 and 3, and is not, after 0 backward passes.",
        ),
        (
            "ddp",
            "head.weight",
            1,
            "weight 'head.weight' must be the same on ranks 0 and 3, and is not, after 2 backward passes.",
        ),
        (
            "hsdp",
            "norm.weight",
            1,
            "weight 'norm.weight' must be the same on ranks 1 and 3, and is not, after 2 backward passes.",
        ),
        (
            "fsdp",
            "gains.scale",
            1,
            "weight 'gains.scale' must be the same on ranks 0 and 3, and is not, after 2 backward passes.",
        ),
        ("fsdp", "norm.weight", 1, ""),
        ("hsdp", "norm.weight", 9, ""),
    ],
)
def test_replicas_are_compared_after_the_first_update(
    four: Ranks, layout: str, name: str, steps: int, message: str
) -> None:
    answers = four.run(diverged, layout, name, steps)
    assert len(set(answers)) == 1
    assert answers[0].startswith(message) if message else not answers[0]


def clipped(layout: str) -> list[str]:
    """What differs on a rank from one process: the norm of all gradients, what it leaves of them, and a step of AdamW's one call for many
    weights after that."""
    wrong = []
    for norm_type, most in ((2.0, 0.05), (1.0, 0.5), (float("inf"), 1e9)):
        alone, module = made(layout, tied=False), made(layout, tied=False)
        mesh = parallelize(module, plan := planned(layout, tied=False), device=CPU)
        tensor = mesh["tensor"] if "tensor" in (mesh.mesh_dim_names or ()) else None
        num = plan.mesh.num_devices // (1 if tensor is None else tensor.size())
        batch = torch.randint(VOCAB, (8, 6), generator=torch.Generator().manual_seed(2))
        rows = batch.chunk(num)[dist.get_rank() // (4 // num)]
        loss_of(module, rows, 0, tensor, uses=False).backward()
        loss_of(alone, batch, 0, uses=False).backward()
        norm = clip_grad_norm_(module.parameters(), most, norm_type)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), most, norm_type)
        if type(norm) is not torch.Tensor or abs(norm - expected) > 1e-5 * expected:
            wrong.append(f"norm {norm_type}: {norm} beside {expected}")
        torch.optim.AdamW(parameter_groups(module), lr=1e-2, foreach=True, eps=1e-4).step()
        torch.optim.AdamW(alone.parameters(), lr=1e-2, foreach=True, eps=1e-4).step()
        for (name, weight), other in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert weight.grad is not None
            assert other.grad is not None
            for found, single in ((weight.grad, other.grad), (weight, other)):
                if not torch.allclose(own_changes.full(found), single.detach(), rtol=1e-4, atol=1e-5):
                    wrong.append(f"{name}, norm {norm_type}")
    return wrong


@pytest.mark.parametrize("layout", ["fsdp", "ep", "fsdp-tp", *(rest(one) for one in ("ddp", "hsdp", "ddp-tp"))])
def test_gradients_are_clipped_as_in_one_process(four: Ranks, layout: str) -> None:
    assert four.run(clipped, layout) == [[]] * 4


@pytest.mark.parametrize(
    ("value", "warned"), [(float("nan"), True), (float("inf"), True), (float("-inf"), False), (1.0, False)]
)
def test_a_buffer_that_no_checkpoint_holds_and_nothing_has_filled(one: Ranks, value: float, warned: bool) -> None:
    assert one.run(warnings_of_buffer, value) == [
        [
            "buffer 'angles' is not finite. No checkpoint holds it, and the module was made on `meta`: fill it after `to_empty`."
        ]
        * warned
    ]


def warnings_of_buffer(value: float) -> list[str]:
    """What two passes of a module warn of, whose buffer has this value after ``to_empty``."""
    module = nn.Linear(2, 2, bias=False, device="meta")
    module.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    parallelize(module, plan_of({"data": "data"}, {"data": 1}, module, {"weight": "mlp: mlp embed"}), device=CPU)
    module.to_empty(device="cpu")
    nn.init.ones_(module.weight)
    module.get_buffer("angles").fill_(value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
    return [str(warning.message) for warning in caught]

"""What a program does with a parameter whose weight rests as codes: as with any other parameter, of its main weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from shardwright.engine_torch.modules import keep_main_weights
from tests.engine_torch.own_saved import message
from tests.engine_torch.test_resting_modules import high, resting

READS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first elements in one row": lambda weight: weight.view(-1)[:5],
    "largest of all": lambda weight: weight.flatten().topk(3).values,
    "a size that follows": lambda weight: weight.view(16, -1).sum(0),
    "one row and back": lambda weight: weight.view(-1).view(weight.shape) + 0,
    "three dims": lambda weight: weight.reshape(-1).reshape(2, -1, weight.shape[1]).amax((0, 2)),
    "a product in one row": lambda weight: weight.view(-1).dot(weight.flatten()),
    "strides": lambda weight: weight.as_strided((5,), (3,), 2).clone(),
    "turned": lambda weight: weight.mT[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_view_has_the_elements_of_the_main_weight(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = resting("mxfp8").fc2_weight.detach()
    assert torch.equal(read(weight), read(weight + 0))


def test_parameters_go_through_a_vector() -> None:
    ours, theirs, x = resting("mxfp8"), high("mxfp8"), torch.randn(4, 128)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 1.5, module.parameters())
        assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), vector * 1.5)
    assert torch.equal(ours(x), theirs(x))


def test_data_is_replaced_and_put_back() -> None:
    ours, x = resting("fp8-block"), torch.randn(4, 128)
    before, data = ours(x), ours.fc2_weight.data
    ours.fc2_weight.data = torch.zeros_like(data)
    assert torch.equal(ours(x), ours.get_parameter("fc2_bias").expand(4, -1))
    ours.fc2_weight.data = data
    assert torch.equal(ours(x), before)
    assert message(setattr, ours.fc2_weight, "data", torch.zeros(3)).startswith(
        "LayerNormMLP: 'fc2_weight': its data would be (3,) in torch.float32 on cpu, and its main weight is (128, "
    )


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_makes_its_state_first_needs_no_main_weights(*, fused: bool) -> None:
    ours, x = resting("mxfp8", main=False), torch.randn(4, 128)
    optimizer = torch.optim.Adagrad(ours.parameters(), initial_accumulator_value=0.5, fused=fused)
    keep_main_weights(ours, optimizer)
    state = optimizer.state[ours.fc2_weight]["sum"]
    assert type(state) is torch.Tensor
    assert torch.equal(state, torch.full(ours.fc2_weight.shape, 0.5))
    before = ours(x)
    before.square().sum().backward()
    optimizer.step()
    assert not torch.equal(ours(x), before)


WRITES: Mapping[str, Callable[[torch.Tensor], object]] = {
    "an element": lambda weight: weight.__setitem__((3, 5), 9.0),
    "a row": lambda weight: weight[7].zero_(),
    "rows": lambda weight: weight[2:9].mul_(3),
    "chosen rows": lambda weight: weight.__setitem__(torch.tensor([1, 4]), 0.5),
    "columns": lambda weight: weight.mT[5].fill_(2),
    "the diagonal": lambda weight: weight.diagonal().fill_(4),
    "a view of a view": lambda weight: weight.view(-1)[64:][:8].neg_(),
    "what detach gives": lambda weight: weight.detach()[0].add_(1),
    "one row after the other": lambda weight: [row.mul_(2) for row in weight.unbind()],
    "a part": lambda weight: weight.narrow(0, 2, 4).copy_(torch.ones(4, weight.shape[1])),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_codes_follow_what_is_written_through_a_view(write: Callable[[torch.Tensor], object]) -> None:
    ours, theirs, x = resting("fp8-row"), high("fp8-row"), torch.randn(4, 128)
    before = ours(x)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for module in (ours, theirs):
            write(module.fc2_weight)
    assert torch.equal(ours(x), theirs(x))
    assert not torch.equal(ours(x), before)


def test_codes_follow_a_view_that_is_written_to_later() -> None:
    ours, theirs, x = resting("fp8-row"), high("fp8-row"), torch.randn(4, 128)
    theirs.load_state_dict(ours.state_dict())
    rows = [module.fc2_weight.detach()[:3] for module in (ours, theirs)]
    for factor in (2, 0.3):
        for row in rows:
            row.mul_(factor)
        assert torch.equal(ours(x), theirs(x))


def test_a_copy_that_is_made_before_codes_follow_has_them_too() -> None:
    ours, x = resting("fp8-row"), torch.randn(4, 128)
    with torch.no_grad():
        ours.fc2_weight.mul_(3)
    other = copy.deepcopy(ours)
    assert torch.equal(other(x), ours(x))

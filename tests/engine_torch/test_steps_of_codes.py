"""Steps of a model whose products are of codes on a B200 that is not there, by what PyTorch documents: beside those of the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Chip
from shardwright.engine_torch.lowering import links
from shardwright.models import build
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_torch.logits import plan_of_one_rank
from tests.engine_torch.training import RankRun, train
from tests.models.published import one_document
from tests.precision import documented

B200 = Chip(name="a B200", usable_bytes=2**37, source="here", capability=(10, 0))
OPTIONS = OptimizerOptions(lr=1e-3, warmup=1, steps=10, weight_decay=0.1, clip=1.0)
ROWS, LENGTH, STEPS = 2, 40, 2
NEAR = 0.02
"""Of losses near 6 and of norms of gradients: twice what bfloat16 rounds, in a product and in what is added to it."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def planned(model: str, recipe: Recipe) -> Plan:
    table = build(model, {"num_layers": "2" if model == "deepseek3-test" else "1"})
    request = plan_of_one_rank(table, ROWS, LENGTH, "bfloat16").request
    return make_plan(replace(request, precision=recipe, chip=B200))


def run(plan: Plan) -> RankRun:
    rng, vocab = np.random.default_rng(3), plan.request.table.sizes["vocab"]
    batches = []
    for _ in range(STEPS):
        tokens = rng.integers(0, vocab, (ROWS, LENGTH + 1)).astype(np.int32)
        arrays = {**one_document((ROWS, LENGTH)), "tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        fields = {name: np.asarray(array, np.int32) for name, array in arrays.items()}
        batches.append({**fields, "valid": np.ones((ROWS, LENGTH), bool)})
    return train(plan, 1, OPTIONS, batches)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("mixtral-test", "mxfp8"),
        pytest.param("mixtral-test", "fp8-block", marks=pytest.mark.matrix),
        pytest.param("mixtral-test", "nvfp4", marks=pytest.mark.matrix),
        pytest.param("llama3-test", "nvfp4", marks=pytest.mark.matrix),
        pytest.param("llama3-test", "fp8-block", marks=pytest.mark.matrix),
        pytest.param("deepseek3-test", "mxfp8", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("gathered", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["", "codes gathered"])
def test_a_step_multiplies_the_codes_that_its_plan_says(
    model: str, recipe: str, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(model, replace(preset(recipe), gather_quantized=gathered))
    of_values = run(plan)
    calls: list[str] = []

    def counted(name: str):
        product = getattr(documented, name)

        def call(*given, **named):
            calls.append(name)
            return product(*given, **named)

        return call

    for name in ("scaled_mm", "scaled_grouped_mm"):
        monkeypatch.setattr(functional, name, counted(name))
    monkeypatch.setattr(links, "product_device", lambda _: B200.device)
    of_codes = run(plan)
    experts = [weight for weight in plan.quantized if weight.experts is not None]
    one_call = [weight for weight in experts if recipe != "nvfp4"]
    layers = {weight.name: weight.num for weight in plan.quantized}
    assert calls.count("scaled_grouped_mm") == STEPS * 3 * sum(layers[weight.name] for weight in one_call)
    others = [weight for weight in plan.quantized if weight.experts is None]
    assert calls.count("scaled_mm") >= STEPS * 3 * sum(layers[weight.name] for weight in others)
    for weight in plan.quantized:
        kernels = {one.name for one in weight.kernels.values()}
        assert kernels == {"nvfp4" if recipe == "nvfp4" else "mx of experts" if weight in experts else "mx"}
    for codes, values in zip(of_codes.steps, of_values.steps, strict=True):
        assert abs(codes.loss - values.loss) <= NEAR
        assert abs(codes.grad_norm - values.grad_norm) <= NEAR * values.grad_norm

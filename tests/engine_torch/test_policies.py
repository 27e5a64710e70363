"""Policies of recomputation on PyTorch: what is held between the passes is what the plan counts, and nothing kept is computed again.

The oracle is PyTorch: the storages that live between the two passes, and the operations of a step, counted below the engine.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.core.plan.memory import kept_runs, saved_by_layers
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_torch.dry_run import imagined
from shardwright.engine_torch.dry_run.counting import Counting
from shardwright.engine_torch.dry_run.dry_run import dry_run
from shardwright.engine_torch.dry_run.imagined import evenly
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.io.private import imagined_ranks, without_values
from shardwright.engine_torch.model.model import Model
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.matrix import rest

LLAMA3, MIXTRAL, DEEPSEEK3 = "llama3-test", "mixtral-test", "deepseek3-test"
LAYERS = {LLAMA3: "2", MIXTRAL: "2", DEEPSEEK3: "3"}
PRODUCTS = ("aten.mm.default", "aten.bmm.default")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def plan_of(model: str, remat: str) -> Plan:
    options = {"batch": 16, "length": 64, "engine": "torch", "dtype": "bfloat16"}
    table = build(model, {"num_layers": LAYERS[model]})
    return make_plan(
        Request(layout=load_layout("fsdp"), table=table, mesh_sizes={"fsdp": 4}, remat=remat, **options)  # pyright: ignore[reportArgumentType]
    )


def held_between(plan: Plan) -> tuple[int, int]:
    """Bytes on the device and on the host that a forward pass has made and its backward pass needs."""
    with imagined_ranks(plan.mesh.num_devices):
        model = Model(plan, ranks_of(plan, torch.device("cpu")), weights_on=torch.device("meta"), how_many=evenly)
        counting = Counting(plan.mesh, {})
        with without_values(), counting, counting.held.watching():
            model.to_empty(device=torch.device("cpu"))
            imagined._state(model)
            batch = imagined._batch(plan, 16, 0)
            before = counting.held.now
            result = model(batch)
            found = counting.held.now - before, counting.on_host.now
    del result
    return found


def planned(plan: Plan, where: Literal["saved", "hosted"] = "saved") -> int:
    runs = kept_runs(plan.request, plan.mesh, plan.tensors)
    return saved_by_layers(plan.request, plan.mesh, plan.tensors, runs, where)


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        (LLAMA3, "dots,host=residual.stream,mlp.gate"),
        (LLAMA3, "keep=attention.keys,mlp.gate@::2+keep=residual.middle,mlp.input,attention.projected"),
        (MIXTRAL, "keep=moe.gate,moe.up,moe.dispatched,router.scores"),
        (LLAMA3, "none,recompute=weights"),
        (LLAMA3, "keep=attention.attended"),
        rest(LLAMA3, "dots"),
        rest(MIXTRAL, "dots"),
        rest(DEEPSEEK3, "dots"),
        rest(DEEPSEEK3, "keep=attention.latent,attention.query_latent,shared.up,moe.dispatched,host=residual.stream"),
    ],
)
def test_what_is_held_is_what_the_plan_counts(model: str, remat: str) -> None:
    """Beside what a layer holds that keeps its input alone. A layer that keeps all keeps one number of each norm for each token, which is
    not planned."""
    full, kept = plan_of(model, "full"), plan_of(model, remat)
    (device, _), (more, host) = held_between(full), held_between(kept)
    of_norms = int(LAYERS[model]) * 2 * 16 // 4 * 64 * 4 if remat.startswith("none") else 0
    assert more - device == planned(kept) - planned(full) + of_norms
    assert host == planned(kept, "hosted")


def counted(remat: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The operations of a step."""
    changed, found = imagined.changed, Counter[str]()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def watched(*arguments):
        with Operations():
            return changed(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(imagined, "changed", watched)
        dry_run(plan_of(LLAMA3, remat))
    return found


@pytest.mark.parametrize(
    ("remat", "products", "attentions"),
    [
        # Of the seven products of a layer the last is none that its backward pass needs.
        ("full", 6, 1),
        ("dots", 0, 1),
        ("keep=mlp.gate,mlp.up", 4, 1),
        # What attention adds is made for the stream alone.
        ("keep=residual.middle,attention.attended", 5, 0),
        ("host=attention.queries,attention.keys,attention.values,attention.attended", 3, 0),
    ],
)
def test_nothing_that_is_kept_is_computed_again(
    remat: str, products: int, attentions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    none, found = (counted(one, monkeypatch) for one in ("none", remat))
    layers = int(LAYERS[LLAMA3])
    assert sum(found[name] - none[name] for name in PRODUCTS) == products * layers
    assert found[ATTENTION] - none[ATTENTION] == attentions * layers

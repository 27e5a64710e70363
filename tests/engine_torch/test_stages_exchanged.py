"""What stages on one engine save, stages on the other load: through both and back, every element has the same bits."""

from __future__ import annotations

from pathlib import Path

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.checkpoint import RunPoint, open_newest, verify
from shardwright.core.engines.engines import Engine
from tests.engine_torch.ranks import Ranks
from tests.pairs import on_jax, on_torch
from tests.pairs.cases import as_bits, values_of

SETTINGS = "num_layers=3 embed=48 num_heads=4 num_kv_heads=4 head_dim=10 mlp=108 vocab=257 tied=true"


def staged(engine: Engine, sizes: dict[str, int], stages: str) -> Plan:
    request = Request(
        layout=load_layout("pp"),
        table=model_table("llama3-test", dict(setting.split("=") for setting in SETTINGS.split())),
        batch=8,
        length=16,
        mesh_sizes=sizes,
        engine=engine,
        microbatches=4,
        stages=stages,
    )
    plan = make_plan(request)
    assert not plan.errors, plan.errors
    return plan


def assert_values(folder: Path) -> None:
    assert verify(folder)["ok"]
    checkpoint = open_newest(folder)
    assert checkpoint.point.step == 7
    for name, info in checkpoint.tensors.items():
        needed = values_of(name, tuple(info.shape), info.dtype)
        assert (as_bits(checkpoint.read_box(name)) == as_bits(needed)).all(), name


def test_a_checkpoint_of_stages_goes_from_engine_to_engine(four: Ranks, tmp_path: Path) -> None:
    point = RunPoint(step=7, seed=0, data_position=0, model="m", layout_name="pp", layout_text="", mesh={})
    first, second, third = (tmp_path / name for name in ("torch", "jax", "torch again"))
    four.run(on_torch.save, staged("torch", {"stage": 2, "fsdp": 2}, "E|tttL"), point, first, True)
    assert_values(first)
    on_jax.saved_again(staged("jax", {"stage": 3, "fsdp": 2}, "Et|t|tL"), open_newest(first), second)
    assert_values(second)
    four.first(2).run(on_torch.saved_again, staged("torch", {"stage": 2, "fsdp": 1}, "Ett|tL"), second, third)
    assert_values(third)
    assert open_newest(third).tensors.keys() == open_newest(first).tensors.keys()

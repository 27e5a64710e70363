"""What PyTorch does not train is said before anything is allocated, with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli.options import PlanOptions
from shardwright.cli.request import asked, planned
from shardwright.core.errors import InputError
from shardwright.engine_torch.support import require_support


def plan_of(model: str, layout: str, mesh: str):
    options = PlanOptions(mesh=mesh, engine="torch", batch=8, length=32)
    return planned(asked(model, layout, options))


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_dim_0_is_what_fully_shard_cuts(layout: str) -> None:
    require_support(plan_of("llama3-test", layout, "fsdp=2"))


def test_a_weight_stored_on_another_dim_is_refused_by_name(tmp_path: Path) -> None:
    layout = tmp_path / "elsewhere.yaml"
    layout.write_text("name: elsewhere\nmesh: {fsdp: 2}\nroles:\n  fsdp: {elsewhere: fsdp, weights: mlp}\n", "utf-8")
    with pytest.raises(InputError) as refused:
        require_support(plan_of("llama3-test", str(layout), "fsdp=2"))
    assert "'fsdp' stores 'layers.mlp.down' on 'mlp', its dim 1 as PyTorch keeps it (embed mlp/fsdp)" in str(
        refused.value
    )
    assert "fully_shard cuts dim 0, 'embed'" in str(refused.value)


def test_a_tied_weight_of_two_forms_is_refused(tmp_path: Path) -> None:
    require_support(plan_of("llama3-1b", "fsdp-tp", "fsdp=1,tensor=2"))
    layout = tmp_path / "twice.yaml"
    layout.write_text("name: twice\nmesh: {tensor: 2}\nroles:\n  tensor: {elsewhere: tensor, logits: idle}\n", "utf-8")
    with pytest.raises(InputError, match="PyTorch gathers a weight once for both"):
        require_support(plan_of("llama3-1b", str(layout), "tensor=2"))

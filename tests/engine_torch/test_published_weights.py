"""Published weights through both engines: imported, the logits of transformers under several layouts; trained, exported and
loaded by transformers, the logits of the trained run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardwright.checkpoint import open_newest
from shardwright.cli.main import main
from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.policies.runs import runs_of
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.attention.kernels import backend_of
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.shardings import named_sharding, weight_shardings
from shardwright.engine_jax.model.forward import forward
from shardwright.engine_jax.training.snapshot import load_state
from shardwright.engine_jax.training.step import batch_sharding
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.engine_jax.commands import TEXT
from tests.engine_torch.published_logits import rank_logits
from tests.engine_torch.ranks import Ranks
from tests.interop.fp8_folder import quantize_folder
from tests.interop.published_folder import loaded_again, made_folder
from tests.matrix import rest, some
from tests.models.published import TOLERANCE, one_document

ROWS, LENGTH = 8, 32
SMALL = {"num_layers": "2", "vocab": "512"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model at test size."""

    model: str
    settings: dict[str, str]
    fp8: bool = False

    @property
    def table(self) -> ModelTable:
        return build(self.model, {**SMALL, **self.settings})

    @property
    def shard(self) -> str:
        """The size of a file with which there are three."""
        return f"{int(0.42 * self.table.num_parameters * (2 if self.fp8 else 4)) // 1000}KB"


FAMILIES = {
    "llama": Family(model="llama3-test", settings={"embed": "128", "mlp": "256"}),
    "llama tied": Family(model="llama3-test", settings={"embed": "128", "mlp": "256", "tied": "true"}),
    "mixtral": Family(model="mixtral-test", settings={}),
    "deepseek": Family(
        model="deepseek3-test",
        settings={"num_experts": "8", "rope.original_length": "32"},
        fp8=True,
    ),
}

DENSE = {
    "fsdp": ("fsdp=8", "fsdp=4"),
    "tp": ("data=2,tensor=4", "data=1,tensor=4"),
    "cp": ("fsdp=2,context=4", "fsdp=2,context=2"),
}
EXPERTS = {
    "ep": ("data=1,fsdp=2,expert=4", "data=1,fsdp=2,expert=2"),
    "tp": ("data=2,tensor=4", "data=2,tensor=2"),
    "ep-as-cp": ("fsdp=2,expert=4", "fsdp=2,expert=2"),
}
"""Three layouts, with their mesh on 8 simulated devices of JAX and on 4 ranks of PyTorch."""

CASES = [(family, layout) for family in FAMILIES for layout in (DENSE if family.startswith("llama") else EXPERTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A folder, the checkpoint of its weights in float32 under ``out``, and the logits that transformers computes."""

    folder: Path
    out: Path
    logits: np.ndarray


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Imported]:
    @cache
    def of(name: str) -> Imported:
        family, top = FAMILIES[name], tmp_path_factory.mktemp("published")
        dtype = torch.bfloat16 if family.fp8 else torch.float32
        made = made_folder(top / "folder", family.model, {**SMALL, **family.settings}, shard=family.shard, dtype=dtype)
        assert len(list(made.path.glob("*.safetensors"))) == 3
        reference = made.path
        if family.fp8:
            config = (made.path / "config.json").read_text()
            values = quantize_folder(made.path)
            reference = top / "dequantized"
            reference.mkdir()
            (reference / "config.json").write_text(json.dumps({**json.loads(config), "dtype": "float32"}))
            save_file({key: value.float() for key, value in values.items()}, reference / "model.safetensors")
        arguments = ["ckpt", "import", "huggingface", str(made.path), "--out", str(top / "out"), "--dtype", "float32"]
        assert main([*arguments, "--json"]) == 0
        return Imported(folder=made.path, out=top / "out", logits=theirs(reference))

    return of


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, int(SMALL["vocab"]), (ROWS, LENGTH)).astype(np.int32)


def batch() -> dict[str, np.ndarray]:
    fields = {**one_document((ROWS, LENGTH)), "tokens": tokens(), "targets": tokens()}
    arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in fields.items()}
    return {**arrays, "valid": np.ones((ROWS, LENGTH), np.bool_)}


def theirs(folder: Path) -> np.ndarray:
    with torch.no_grad():
        logits = loaded_again(folder)(torch.from_numpy(tokens()).long()).logits.numpy()
    assert logits.dtype == np.float32
    assert np.std(logits) > 0.5
    return logits


def plan_of(family: Family, layout: str, mesh: str, engine: str) -> Plan:
    plan = make_plan(
        Request(
            layout=load_layout(layout),
            table=family.table,
            batch=ROWS,
            length=LENGTH,
            mesh_sizes=mesh_sizes(mesh),
            engine=engine,  # pyright: ignore[reportArgumentType]
            remat="none",
            dtype="float32",
        )
    )
    assert not plan.errors, plan.errors
    return plan


def jax_logits(plan: Plan, out: Path) -> np.ndarray:
    mesh = device_mesh(plan.mesh)
    state = load_state(open_newest(out), plan, mesh, weights_only=True)
    links, sharding = links_of(plan, backend_of(mesh)), batch_sharding(plan, mesh)
    weights = {name: one.spec for name, one in weight_shardings(plan, mesh).items()}
    fields = batch()
    function = jax.shard_map(
        lambda weights, batch: (
            forward(weights, batch, plan.request.table, links, runs=runs_of(plan.request.table, "none")).logits_BLV
        ),
        mesh=mesh,
        in_specs=(weights, dict.fromkeys(fields, sharding.spec)),
        out_specs=named_sharding(plan.by_name["logits.scores"].in_use, mesh).spec,
        check_vma=False,
    )
    placed = {name: jax.device_put(array, sharding) for name, array in fields.items()}
    return np.asarray(jax.jit(function)({**state.weights, **state.buffers}, placed))


def torch_logits(plan: Plan, out: Path, ranks: Ranks) -> np.ndarray:
    logits = np.full((ROWS, LENGTH, plan.request.table.sizes["vocab"]), np.nan, np.float32)
    for box, array in ranks.run(rank_logits, plan, out, batch()):
        assert box is not None
        logits[box.slices] = array
    return logits


@pytest.mark.parametrize("case", some(CASES, (1, 5, 6, 11)))
def test_logits_on_jax(case: tuple[str, str], imported: Callable[[str], Imported]) -> None:
    name, layout = case
    found = imported(name)
    meshes = DENSE if name.startswith("llama") else EXPERTS
    ours = jax_logits(plan_of(FAMILIES[name], layout, meshes[layout][0], "jax"), found.out)
    np.testing.assert_allclose(ours, found.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", some(CASES, (2, 4, 8, 9)))
def test_logits_on_pytorch(case: tuple[str, str], imported: Callable[[str], Imported], four: Ranks) -> None:
    name, layout = case
    found = imported(name)
    meshes = DENSE if name.startswith("llama") else EXPERTS
    ours = torch_logits(plan_of(FAMILIES[name], layout, meshes[layout][1], "torch"), found.out, four)
    np.testing.assert_allclose(ours, found.logits, rtol=0, atol=TOLERANCE)


JAX_RUN = {
    True: ["--layout", "ep", "--mesh", "data=1,fsdp=2,expert=4"],
    False: ["--layout", "fsdp", "--mesh", "fsdp=8"],
}
TORCH_RUN = ["--layout", "fsdp", "--mesh", "fsdp=1", "--engine", "torch"]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        rest("llama", "jax"),
        rest("llama", "torch"),
        ("llama tied", "jax"),
        rest("llama tied", "torch"),
        rest("mixtral", "jax"),
        ("mixtral", "torch"),
        rest("deepseek", "jax"),
        ("deepseek", "torch"),
    ],
)
def test_trained_exported_and_loaded_by_transformers(
    name: str, engine: str, imported: Callable[[str], Imported], tmp_path: Path
) -> None:
    found, family = imported(name), FAMILIES[name]
    settings = [f"{key}={value}" for key, value in {**SMALL, **family.settings}.items()]
    layout = TORCH_RUN if engine == "torch" else JAX_RUN[not name.startswith("llama")]
    model = [family.model, "--set", *settings, "--dtype", "float32", "--batch", "8", "--length", "32", "--data", TEXT]
    steps = ["--steps", "5", "--lr", "1e-2", "--weights", str(found.out), "--out", str(tmp_path / "run")]
    assert main(["train", *model, *layout, *steps, "--json"]) == 0
    # Without another option: the run has the configuration of the folder.
    assert (
        main(["ckpt", "export", "huggingface", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--json"]) == 0
    )
    needed = theirs(tmp_path / "back")
    assert np.max(np.abs(needed - found.logits)) > 0.1
    plan = plan_of(family, "ddp", "data=1", "jax")
    np.testing.assert_allclose(jax_logits(plan, tmp_path / "run"), needed, rtol=0, atol=TOLERANCE)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert os.listdir(tmp_path / "back").count("model.safetensors") == 1

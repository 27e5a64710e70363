"""`ckpt show --for` and `ckpt reshard`: the bytes are those that a load reads, and no element changes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import Checkpoint, OwnedBox, TensorInfo, open_checkpoint, save_checkpoint, verify
from shardwright.checkpoint.exchange.passing import read_together
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.checkpoint.reading import opened
from shardwright.cli.main import main
from shardwright.core.boxes.box import Box
from shardwright.core.model.architecture import architecture_values
from shardwright.core.plan.saved_boxes import saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.optimizer import FIRST, SECOND
from tests.checkpoint.editing import data_file, flip
from tests.checkpoint.states import point, same_bits
from tests.checkpoint.test_passing import ThreadCarrier, by_all

SETTINGS = {
    "llama3-test": {
        "num_layers": "3",
        "embed": "48",
        "num_heads": "6",
        "num_kv_heads": "2",
        "mlp": "96",
        "vocab": "50",
    },
    "mixtral-test": {"num_layers": "2"},
}
CASES = {
    "fsdp on torch": ("llama3-test", "fsdp", "fsdp=4", "torch"),
    "uneven": ("llama3-test", "fsdp", "fsdp=7", "jax"),
    "heads in pieces": ("llama3-test", "fsdp-tp", "fsdp=5,tensor=2", "torch"),
    "replicas": ("llama3-test", "hsdp", "data=2,fsdp=2", "jax"),
    "experts": ("mixtral-test", "ep", "fsdp=2,expert=4", "jax"),
    "stages on torch": ("llama3-test", "pp", "stage=2,fsdp=2", "torch"),
    "uneven stages": ("llama3-test", "pp", "fsdp=2,stage=3", "jax"),
}


def arguments_of(model: str, layout: str, mesh: str, engine: str) -> list[str]:
    settings = [f"{name}={value}" for name, value in SETTINGS[model].items()]
    return [layout, "--mesh", mesh, "--engine", engine, "--set", *settings]


def plan_of(model: str, layout: str, mesh: str, engine: Any):
    sizes = {axis: int(size) for axis, _, size in (one.partition("=") for one in mesh.split(","))}
    recipe = preset("fp8-delayed", amax_history_len=3) if model == "mixtral-test" else None
    return make_plan(
        Request(
            layout=load_layout(layout),
            table=build(model, SETTINGS[model]),
            batch=8,
            length=64,
            mesh_sizes=sizes,
            engine=engine,
            precision=recipe,
        )
    )


def saved(out: Path, model: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of a model with moments, delayed amaxes of experts, and two tensors that no layout shards, in boxes of columns."""
    table, rng = build(model, SETTINGS[model]), np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "loader/position": np.arange(3, dtype=np.int64),
        "optimizer/count": np.arange(2, dtype=np.int32),
    }
    if model == "mixtral-test":
        for one in plan_of(*CASES["experts"]).delayed_tensors:
            arrays[one.name] = rng.standard_normal(one.shape, np.float32)
    for weight in table.weights:
        shape = (weight.num, *weight.shape) if weight.stack else weight.shape
        for prefix in ("",) if weight.frozen else ("", FIRST, SECOND):
            arrays[prefix + weight.name] = rng.standard_normal(shape, np.float32)
    infos = [TensorInfo(name=name, shape=one.shape, dtype=one.dtype.name) for name, one in arrays.items()]
    owned: list[OwnedBox] = []
    for name, one in arrays.items():
        half = one.shape[-1] // 2 if one.shape[-1] > 1 else 1
        for start, stop in ((0, half), (half, one.shape[-1])):
            if start < stop:
                box = Box((*[0] * (one.ndim - 1), start), (*one.shape[:-1], stop))
                owned.append(OwnedBox(name=name, box=box, array=one[box.slices]))
    found = replace(point(), model=model, metadata=architecture_values(table))
    return Path(str(save_checkpoint(out, found, infos, owned))), arrays


@pytest.mark.parametrize("case", CASES)
def test_a_resharded_checkpoint_is_the_same_in_the_boxes_of_the_layout(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = CASES[case][0]
    directory, arrays = saved(tmp_path / "a", model)
    layout, *on = arguments_of(*CASES[case])
    to = ["--out", str(tmp_path / "b"), "--layout", layout, *on]
    assert main(["ckpt", "reshard", str(directory), *to, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = open_checkpoint(shown["directory"])
    assert verify(tmp_path / "b")["ok"]
    assert all(same_bits(found.read_box(name), array) for name, array in arrays.items())
    assert (found.point.step, found.point.data_position, found.point.seed) == (10, 80, 3)
    plan = plan_of(*CASES[case])
    assert dict(found.point.mesh) == dict(plan.mesh.shape)
    # What a device saves is in its own part, and covers the tensors together with the others.
    for device in range(plan.mesh.num_devices):
        stored = Counter(box.info.name for box in found.parts.stored(device))
        mine = {one.weight for one in saved_boxes(plan, device) if one.saves}
        names = {prefix + name for name in mine for prefix in ("", FIRST, SECOND)} & set(arrays)
        assert set(stored) == names | ({"loader/position", "optimizer/count"} if device == 0 else set())
    assert shown["after"]["bytes_read"] <= shown["before"]["bytes_read"]
    assert main(["ckpt", "reshard", str(directory), *to]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


def test_stages_are_exchanged_for_other_stages_and_for_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the boxes of four stages, of three uneven ones as given, of two on the other engine, and of none: the same bits."""
    source, arrays = saved(tmp_path / "start", "llama3-test")
    settings = ["--set", *(f"{name}={value}" for name, value in SETTINGS["llama3-test"].items())]
    for number, on in enumerate(
        (
            ["pp", "--mesh", "stage=4,fsdp=1", "--engine", "torch"],
            ["pp", "--mesh", "stage=3,fsdp=2", "--engine", "jax", "--stages", "Et|t|tL"],
            ["pp", "--mesh", "stage=2,fsdp=2", "--engine", "jax"],
            ["fsdp", "--mesh", "fsdp=3", "--engine", "torch"],
        )
    ):
        out = tmp_path / str(number)
        assert main(["ckpt", "reshard", str(source), "--out", str(out), "--layout", *on, *settings]) == 0
        found = open_checkpoint(next((out / "checkpoints").glob("step-*")))
        assert all(same_bits(found.read_box(name), array) for name, array in arrays.items())
        source = out
    capsys.readouterr()


def test_it_goes_to_an_object_store_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, arrays = saved(tmp_path / "a", "llama3-test")
    store, back = "memory://cli/reshard", str(tmp_path / "back")
    for source, out, case in ((str(directory), store, "heads in pieces"), (store, back, "uneven")):
        on = arguments_of(*CASES[case])
        assert main(["ckpt", "reshard", source, "--out", out, "--layout", *on]) == 0
        assert verify(out)["ok"]
        found = open_checkpoint(f"{out}/checkpoints/step-00000010")
        assert all(same_bits(found.read_box(name), array) for name, array in arrays.items())
        assert len(found.parts) == plan_of(*CASES[case]).mesh.num_devices
    assert main(["ckpt", "show", store, "--for", *arguments_of(*CASES["replicas"]), "--json"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "reshard", str(directory), "--out", store, "--layout", *on]) == 2
    assert f"{store} already holds a checkpoint. Give another --out." in capsys.readouterr().err


def read_by(checkpoint: Checkpoint, plan: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each process really reads in a load of the state of a run by a process for each device."""
    read: Counter[int] = Counter()
    original = opened.read_regions

    def counted(*arguments: Any) -> int:
        num_bytes = original(*arguments)
        read[int(current_thread().name)] += num_bytes
        return num_bytes

    monkeypatch.setattr(opened, "read_regions", counted)
    devices = range(plan.mesh.num_devices)
    boxes: dict[str, dict[int, list[Box]]] = {}
    for device in devices:
        for one in saved_boxes(plan, device):
            boxes.setdefault(one.weight, {each: [] for each in devices})[device].append(one.box)
    # Every process has a count of the optimizer's in full.
    boxes["optimizer/count"] = {device: [Box.whole((2,))] for device in devices}

    def load(carrier: ThreadCarrier) -> None:
        for name, needed in boxes.items():
            wants = wants_of((process, box) for process, each in needed.items() for box in each)
            for prefix in ("", FIRST, SECOND):
                if prefix + name in checkpoint.tensors:
                    read_together(checkpoint, prefix + name, needed[carrier.index], wants, carrier)

    assert by_all(len(devices), load) == [None] * len(devices)
    monkeypatch.undo()
    return [read[device] for device in devices]


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_that_are_shown_are_those_that_are_read(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, arrays = saved(tmp_path, CASES[case][0])
    assert main(["ckpt", "show", str(directory), "--for", *arguments_of(*CASES[case]), "--json"]) == 0
    load = json.loads(capsys.readouterr().out)["load"]
    plan, checkpoint = plan_of(*CASES[case]), open_checkpoint(directory)
    read = read_by(checkpoint, plan, monkeypatch)
    assert (load["bytes_read"], load["most_by_a_device"]) == (sum(read), max(read))
    assert load["bytes"] == sum(array.nbytes for name, array in arrays.items() if name != "loader/position")
    assert sum(one["bytes_read"] for one in load["tensors"]) == load["bytes_read"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mesh", "fsdp=2"],
            "--mesh, --devices, --engine, --stages, --model and --set are for a layout. Give it with --for.",
        ),
        (
            ["--for", "nope", "--set", *(f"{name}={value}" for name, value in SETTINGS["llama3-test"].items())],
            "no layout is called 'nope'.",
        ),
        (["--for", "fsdp", "--mesh", "fsdp=2", "--model", "llama3-test"], "  embed: 256, not 48"),
        (["--for", "fsdp", "--mesh", "fsdp=2", "--model", "mixtral-test"], "are not the same model"),
    ],
)
def test_what_does_not_fit_is_one_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = saved(tmp_path, "llama3-test")
    assert main(["ckpt", "show", str(directory), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_model_is_that_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dimensions need not be given again."""
    directory, _ = saved(tmp_path, "llama3-test")
    given = [f"{name}={value}" for name, value in SETTINGS["llama3-test"].items()]
    shown = []
    for settings in ([], ["--set", *given]):
        assert main(["ckpt", "show", str(directory), "--for", "fsdp", "--mesh", "fsdp=2", "--json", *settings]) == 0
        shown.append(json.loads(capsys.readouterr().out)["load"])
    assert shown[0] == shown[1]


@pytest.mark.parametrize("out", ["b", "b/c"])
def test_a_refused_one_leaves_no_folder(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved(tmp_path / "a", "llama3-test")
    flip(directory / data_file(), -1)
    on = arguments_of("llama3-test", "fsdp", "fsdp=2", "jax")
    assert main(["ckpt", "reshard", str(directory), "--layout", *on, "--out", str(tmp_path / out)]) == 2
    assert "do not match their digest" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    # A folder that was there before is left.
    (tmp_path / out / "checkpoints").mkdir(parents=True)
    assert main(["ckpt", "reshard", str(directory), "--layout", *on, "--out", str(tmp_path / out)]) == 2
    assert (tmp_path / out / "checkpoints").is_dir()


def test_the_view(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    directory, _ = saved(tmp_path / "a", "llama3-test")
    on = arguments_of("llama3-test", "fsdp", "fsdp=2", "jax")
    assert main(["ckpt", "show", str(directory), "--for", *on]) == 0
    shown = capsys.readouterr().out
    assert "\nload\n  onto  fsdp on data 1 x fsdp 2, 2 devices\n  all   " in shown
    assert " times the " in shown
    assert main(["ckpt", "reshard", str(directory), "--layout", *on, "--out", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"resharded to {tmp_path}/b/checkpoints/step-00000010\n  from  {directory}\n  was   ")

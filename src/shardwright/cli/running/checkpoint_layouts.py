"""A checkpoint and a layout: what a load onto it reads, and the same checkpoint in its boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from shardwright.checkpoint import Checkpoint, CheckpointError, committed, open_newest
from shardwright.checkpoint.exchange.loads import Load, load_of
from shardwright.checkpoint.exchange.wants import needed_by_all, wants_of_plan
from shardwright.checkpoint.writing.resharding import Boxes, reshard
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, typed_request
from shardwright.cli.typed.values import settings
from shardwright.cli.typed.verbs import LayoutOptions
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.pipeline.requests import chosen_stages
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import UPDATE, saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.quantization.delayed import HISTORY
from shardwright.core.recipes.presets import preset
from shardwright.interop.hugging_face.weights.model import model_of_checkpoint
from shardwright.storage.url import Place
from shardwright.training.optimizer import saved_as
from shardwright.training.optimizers import OPTIMIZER


def load_onto(directory: Place, layout: str, on: LayoutOptions) -> dict[str, Any]:
    """What a load onto a layout reads of the newest checkpoint of a folder, where each device has a process of its own.

    ``{layout, mesh, engine, devices, bytes, bytes_read, bytes_passed_on, most_by_a_device, amplification, tensors: [{name,
    bytes, bytes_read, bytes_passed_on}]}``:
    ``amplification`` is ``bytes_read`` divided by the ``bytes`` of the tensors that are read.
    """
    checkpoint = open_newest(directory)
    plan = _plan(checkpoint, layout, on)
    return {**_of_plan(plan), **_of_load(_load(checkpoint, plan))}


def reshard_onto(
    directory: Place, layout: str, on: LayoutOptions, out: Place, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the newest checkpoint of a folder under ``out`` in the boxes of a layout.

    ``{directory, from, before, load}``: what a load onto the layout reads before and after, as ``load_onto`` returns it.
    Raises InputError for an ``out`` that has a checkpoint, and for a tensor that is sharded as no weight of the model is.
    """
    if committed(out):
        raise InputError(f"{out} already holds a checkpoint. Give another --out.")
    checkpoint = open_newest(directory)
    plan = _plan(checkpoint, layout, on)
    delayed = _with_delayed(checkpoint, plan)
    sharded_as = _sharded_as(checkpoint, delayed)
    devices = [_saved(sharded_as, delayed, device) for device in range(plan.mesh.num_devices)]
    known = {name for saved in devices for name in saved}
    others = [name for name, info in checkpoint.tensors.items() if name not in known and prod(info.shape)]
    # What no layout shards is saved by the first device, as one box.
    saves = [dict(saved) for saved in devices]
    saves[0] |= {name: [Box.whole(checkpoint.tensors[name].shape)] for name in others}
    specs = {name: str(row.stacked_at_rest) for row in plan.weights for name in sharded_as[row.name]}
    specs |= {name: str(row.stacked_updated) for row in plan.weights for name in sharded_as.get(UPDATE + row.name, ())}
    specs |= {one.name: str(one.spec) for one in delayed.delayed_tensors if sharded_as[one.name]}
    infos = [replace(info, spec=specs.get(name, _unsharded(info.spec))) for name, info in checkpoint.tensors.items()]
    point = replace(
        checkpoint.point,
        layout_name=plan.request.layout.name,
        layout_text=plan.dump(),
        mesh=plan.mesh.shape,
    )
    written = reshard(checkpoint, out, point, infos, saves, progress)
    return {
        "directory": str(written),
        "from": str(checkpoint.directory),
        **_of_plan(plan),
        "before": _of_load(_load(checkpoint, plan)),
        "after": _of_load(_load(open_newest(written), plan)),
    }


def _unsharded(spec: str) -> str:
    """The dims of a spec, of which no axis of the layout shards one.

    >>> _unsharded("layers experts/expert amax_history")
    'layers experts amax_history'
    """
    return " ".join(dim.partition("/")[0] for dim in spec.split())


def _plan(checkpoint: Checkpoint, layout: str, on: LayoutOptions) -> Plan:
    """The plan of a layout for the model of a checkpoint. Raises InputError where they do not fit."""
    model = model_of_checkpoint(checkpoint, None, on.model, settings(on.set))
    pairs = tuple((f"{name}={value}",) for name, value in model.settings.items())
    options = PlanOptions(mesh=on.mesh, devices=on.devices, engine=on.engine, set=pairs, stages=on.stages)
    plan = _in_stages(planned(typed_request(model.name, layout, options)))
    for weight in plan.request.table.weights:
        shape = (weight.num, *weight.shape) if weight.stack else weight.shape
        found = checkpoint.tensors.get(weight.name)
        if found is None or found.shape != shape:
            described = "missing" if found is None else f"of shape {found.shape}"
            raise CheckpointError(
                f"{checkpoint.directory}: '{weight.name}' is {described}, and {model.name} has it of shape {shape}. "
                f"Give the model with --model, and its dimensions with --set.",
                code="SW504",
            )
    return plan


def _with_delayed(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """The plan with a recipe whose factors and histories are those of a checkpoint, whatever else the recipe of its run said."""
    histories = {name: info.shape for name, info in checkpoint.tensors.items() if name.startswith(HISTORY)}
    quantized = {name.removeprefix(HISTORY).rpartition(".")[0] for name, shape in histories.items() if shape}
    known = [weight.name for weight in plan.request.table.weights]
    if not quantized.intersection(known):
        return plan
    recipe = replace(
        preset("fp8-delayed", amax_history_len=next(shape[-1] for shape in histories.values() if shape)),
        quantized=tuple(name for name in known if name in quantized),
        high=tuple(name for name in known if name not in quantized),
    )
    return make_plan(replace(plan.request, precision=recipe))


def _in_stages(plan: Plan) -> Plan:
    """The plan with its stages, whose boxes depend on no number of microbatches. Raises FindingsError where they cannot be made."""
    choice = chosen_stages(plan.request, plan.mesh)
    if choice is not None and choice.faults:
        # Every schedule that runs with so many stages runs with as many microbatches.
        plan = make_plan(replace(plan.request, microbatches=choice.num_stages))
    misplaced = [one for one in plan.errors if one.code == "SW110"]
    if misplaced:
        raise FindingsError(misplaced)
    return plan


def _saved(sharded_as: Mapping[str, Sequence[str]], plan: Plan, device: int) -> Boxes:
    """The boxes that a device saves."""
    saves: dict[str, list[Box]] = {}
    for found in saved_boxes(plan, device):
        if found.saves:
            for name in sharded_as[found.weight]:
                saves.setdefault(name, []).append(found.box)
    return saves


def _load(checkpoint: Checkpoint, plan: Plan) -> Load:
    """What a run that goes on under a plan reads: of an optimizer's state that is not sharded, each device all of it."""
    plan = _with_delayed(checkpoint, plan)
    sharded_as, wants = _sharded_as(checkpoint, plan), wants_of_plan(plan, lambda device: device)
    by_tensor = {name: found for weight, found in wants.items() for name in sharded_as[weight]}
    for name, info in checkpoint.tensors.items():
        if name.startswith(OPTIMIZER) and name not in by_tensor:
            by_tensor[name] = needed_by_all(info.shape, plan.mesh.num_devices)
    return load_of(checkpoint, by_tensor, plan.mesh.num_devices)


def _sharded_as(checkpoint: Checkpoint, plan: Plan) -> Mapping[str, Sequence[str]]:
    """The tensors of a checkpoint that are sharded as a weight is, by weight: itself, and what a run keeps for it."""
    delayed = {one.name: one.shape for one in plan.delayed_tensors}
    found: dict[str, list[str]] = {name: [] for name in (*(row.name for row in plan.weights), *delayed)}
    found |= {UPDATE + row.name: [] for row in plan.weights if row.update_is_sharded}
    for name, info in checkpoint.tensors.items():
        owner = saved_as(plan, name)
        if owner in found and info.shape == delayed.get(name, checkpoint.tensors[owner.removeprefix(UPDATE)].shape):
            found[owner].append(name)
    return found


def _of_plan(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.request.layout.name,
        "mesh": dict(plan.mesh.shape),
        "engine": plan.request.engine,
        "devices": plan.mesh.num_devices,
    }


def _of_load(load: Load) -> dict[str, Any]:
    return {
        "bytes": load.num_bytes,
        "bytes_read": load.bytes_read,
        "bytes_passed_on": load.bytes_passed_on,
        "most_by_a_device": max(load.bytes_by_process),
        "amplification": round(load.bytes_read / max(1, load.num_bytes), 4),
        "tensors": [
            {
                "name": one.name,
                "bytes": one.num_bytes,
                "bytes_read": one.bytes_read,
                "bytes_passed_on": one.bytes_passed_on,
            }
            for one in load.tensors
        ],
    }

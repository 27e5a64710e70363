"""Every preset for every family: the resolved layout is the one we looked at, and keeps the laws, tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import prod
from time import process_time
from typing import get_args

import pytest

from shardwright import Plan, TensorPlan, make_plan, preset_names
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.layout.roles import ROLES
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import layers_on_device
from shardwright.core.resolution.resolve import Refusal
from tests.golden.layouts_matrix import FOLDER, cases, golden_text, make, path_of, request
from tests.slowness import slowness

CASES = tuple(cases())
HOW = "If the layout was meant to move: python -m tests.golden.regenerate, and read the diff."
MILLISECONDS = 100


@cache
def plan_of(preset: str, model: str) -> Plan:
    return make(preset, model)


def row_spec(tensor: TensorPlan) -> Spec:
    """The spec of one layer: without the stack of layers that pipeline stages divide."""
    dims = tensor.spec.dims
    return Spec(dims[len(dims) - len(tensor.shape) :])


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_resolved_layout_is_the_golden_one(preset, model):
    assert golden_text(plan_of(preset, model)) == path_of(preset, model).read_text(encoding="utf-8"), HOW


def test_golden_folder_has_no_file_without_a_case():
    assert set(FOLDER.glob("*/*")) == {path_of(*case) for case in CASES}


def test_matrix_has_all_fourteen_presets_for_all_three_families():
    assert len(preset_names()) == 14
    assert len([model for _, model in CASES if model.endswith("-test")]) == 14 * 3
    assert len([model for _, model in CASES if not model.endswith("-test")]) == 8


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_an_axis_cuts_at_most_one_dim_of_any_tensor(preset, model):
    for tensor in plan_of(preset, model).tensors:
        for spec in (tensor.spec, tensor.in_use):
            # Read from the text, not from the Spec, which asserts the law when it is made.
            axes = [axis for word in str(spec).split() for axis in word.split("/")[1:]]
            assert len(axes) == len(set(axes)), (tensor.name, str(spec))


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_every_axis_asked_for_is_granted_or_the_reason_is_recorded(preset, model):
    plan = plan_of(preset, model)
    layout = plan.request.layout
    for tensor in plan.weights:
        requests = {one.axis: one for one in tensor.axis_requests}
        for axis in plan.mesh.names:
            role = ROLES[layout.role(axis, tensor.component)]
            dims = [n for n in role.weights if n in tensor.in_use.logical_axes or (n == "layers" and tensor.stack)]
            if not dims and not role.stores:
                assert axis not in requests, (tensor.name, axis)
                assert axis not in tensor.spec.axes, (tensor.name, axis)
                continue
            one = requests[axis]
            if one.granted is None:
                assert one.refused in get_args(Refusal), (tensor.name, axis)
                assert axis not in tensor.spec.axes, (tensor.name, axis)
            else:
                assert axis in tensor.spec.axes_of(one.granted), (tensor.name, axis)


@pytest.mark.parametrize("preset", ["cp", "ep", "ep-as-cp", "fsdp", "hsdp"])
def test_every_weight_that_no_dim_can_hold_is_counted_by_a_finding(preset):
    """In the matrix every weight can be stored; five devices divide next to nothing."""
    requests = request(preset, "deepseek3-test")
    sizes = {axis: 5 if axis == "fsdp" else 1 for axis in requests.layout.mesh}
    plan = make_plan(replace(requests, mesh_sizes=sizes, devices=5, batch=10))
    whole = [
        tensor.name for tensor in plan.weights if any(one.refused == "none-divides" for one in tensor.axis_requests)
    ]
    named = [finding for finding in plan.errors if finding.code == "SW114"]
    more = [re.search(r"and (\d+) more weights?", finding.cost) for finding in named]
    assert len(whole) > 3
    assert {finding.tensor for finding in named} <= set(whole)
    assert sum(1 + (int(match[1]) if match else 0) for match in more) == len(whole)


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_bytes_are_those_of_the_largest_box_that_a_device_owns(preset, model):
    plan = plan_of(preset, model)
    for tensor in plan.tensors:
        owned = owned_boxes(row_spec(tensor), plan.mesh, tensor.shape)
        largest = max(sum(box.size for box in boxes) for boxes in owned)
        assert tensor.bytes_per_device == largest * DTYPE_BYTES[tensor.dtype], (tensor.name, str(tensor.spec))


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_resting_weights_of_a_device_add_up(preset, model):
    plan = plan_of(preset, model)
    resting = sum(
        tensor.bytes_per_device * layers_on_device(plan.request, plan.mesh, tensor) for tensor in plan.weights
    )
    assert plan.memory.weights_bytes == resting
    # All devices together hold each element once for every replica, and what padding adds.
    held = sum(
        DTYPE_BYTES[tensor.dtype] * prod(tensor.shape) * tensor.num * plan.mesh.size(tensor.replica_group)
        for tensor in plan.weights
    )
    assert resting * plan.mesh.num_devices >= held


@pytest.mark.parametrize("preset", preset_names())
def test_layout_of_the_largest_model_resolves_in_time(preset):
    """Checks included, on the 128 devices of its natural mesh. Time of this process alone, the best of three."""
    requests = replace(request(preset, "deepseek3-671b"), mesh_sizes={}, devices=128)
    times = []
    for _ in range(3):
        start = process_time()
        make_plan(requests)
        times.append(process_time() - start)
    assert min(times) * 1000 < MILLISECONDS * slowness()

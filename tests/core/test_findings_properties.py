"""Over random requests: the findings agree with a few lines of brute force, and every fix works when it is typed."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright import FindingsError, make_plan, preset_names
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.resolution.request import Chip
from tests.golden.findings_case import Case, findings, mine, request
from tests.golden.typed_fix import layout_text, typed

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
SMALL = st.sampled_from([1, 2, 3])
MODELS = st.sampled_from(["llama3-test", "mixtral-test", "deepseek3-test"])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    preset = draw(st.sampled_from(preset_names()))
    case = Case(name="SW000", model=draw(MODELS), layout=preset, neighbour={})
    axes = [a for a in ("stage", "data", "fsdp", "context", "expert", "tensor") if f"{a}:" in layout_text(case)]
    sizes = {axis: draw(SIZES) for axis in draw(st.lists(st.sampled_from(axes), unique=True, min_size=1))}
    options = {
        "mesh_sizes": sizes,
        "batch": draw(st.sampled_from([4, 8, 12, 16, 48])),
        "length": draw(st.sampled_from([96, 128, 130])),
        "microbatches": draw(st.sampled_from([1, 2])),
        "engine": draw(st.sampled_from(["jax", "torch"])),
    }
    if draw(st.booleans()):
        options["devices"] = draw(st.sampled_from([4, 8, 12, 16]))
    if draw(st.booleans()):
        options["chip"] = Chip(name="a small chip", usable_bytes=2 ** draw(st.integers(20, 28)), source="here")
    return Case(name="SW000", model=case.model, layout=preset, neighbour={}, options=options)


def plan_of(case: Case) -> Plan | None:
    try:
        return resolve(request(case))
    except FindingsError:
        return None


@given(cases())
@settings(max_examples=10)
def test_every_fix_of_a_random_request_works_when_it_is_typed(case):
    assert_fixes_work(case)


@pytest.mark.matrix
@given(cases())
@settings(max_examples=100)
def test_every_fix_of_many_random_requests_works(case):
    assert_fixes_work(case)


def assert_fixes_work(case: Case) -> None:
    before = findings(case)
    errors = {(f.code, f.tensor, f.where) for f in before if f.severity == "error"}
    planned = plan_of(case) is not None
    for finding in before:
        if not finding.fix or finding.fix.endswith("states it"):
            continue
        after = findings(typed(case, finding.fix))
        left = {(f.code, f.tensor, f.where) for f in after if f.severity != "info" or finding.severity == "info"}
        assert (finding.code, finding.tensor, finding.where) not in left
        if planned:
            assert {(f.code, f.tensor, f.where) for f in after if f.severity == "error"} <= errors


@given(cases())
@settings(max_examples=30)
def test_rows_and_tokens_are_refused_exactly_where_a_device_would_get_a_fraction_of_one(case):
    plan = plan_of(case)
    if plan is None:
        return
    refused = {f.where.split("'")[1] for f in make_plan(plan.request).findings if f.code == "SW108"}
    for name in ("batch", "length"):
        divisors = [
            prod(plan.mesh.size(a) for a in t.in_use.axes_of(name))
            * (plan.request.microbatches if name == "batch" else 1)
            for t in plan.activations
            if name in t.in_use.logical_axes
        ]
        assert (name in refused) == any(plan.sizes[name] % n for n in divisors)


@given(cases())
@settings(max_examples=30)
def test_heads_and_experts_are_refused_exactly_where_a_device_would_get_a_fraction_of_one(case):
    plan = plan_of(case)
    if plan is None or plan.request.engine != "jax":
        return
    refused = {f.where.split("'")[1] for f in make_plan(plan.request).findings if f.code == "SW107"}
    broken = set()
    for tensor in plan.weights:
        for size, dim in zip(tensor.shape, tensor.spec.dims[-len(tensor.shape) :], strict=True):
            if size % plan.mesh.size(dim.axes):
                broken.add(dim.logical_axis)
    assert refused == broken


def place_on_dim(plan: Plan, axes: tuple[str, ...], device: int) -> int:
    """The index of the shard of a dim that a device holds, the first axis major."""
    number = 0
    for axis in axes:
        number = number * plan.mesh.size(axis) + plan.mesh.coordinates(device)[axis]
    return number


@given(
    st.permutations(["data", "fsdp", "expert"]),
    st.tuples(SMALL, SMALL, SMALL),
    st.sampled_from(["fsdp", "context", "data"]),
)
@settings(max_examples=30)
@example(["expert", "fsdp", "data"], (2, 2, 2), "fsdp")
def test_a_mesh_order_is_strided_exactly_where_rows_of_neighbours_are_not_adjacent(order, sizes, outside):
    mesh = f"{{{', '.join(f'{axis}: {size}' for axis, size in zip(order, sizes, strict=True))}}}"
    roles = {"data": "data", "fsdp": "fsdp", "expert": f"{{elsewhere: {outside}, moe: expert}}"}
    layout = mine("\n".join(f"{axis}: {roles[axis]}" for axis in order), mesh)
    devices = prod(sizes)
    case = Case(
        name="SW000",
        model="mixtral-test",
        layout=layout,
        neighbour={},
        options={"batch": devices * 2, "length": devices * 2},
    )
    plan = resolve(request(case))
    found = {(f.where.split("'")[1]) for f in make_plan(plan.request).findings if f.code == "SW117"}
    strided = set()
    for tensor in plan.activations:
        for dim in tensor.in_use.dims:
            starts = [place_on_dim(plan, dim.axes, device) for device in range(devices)]
            # An axis in between repeats shards; the order of the shards must be that of the mesh.
            if list(dict.fromkeys(starts)) != sorted(set(starts)):
                strided.add(dim.logical_axis)
    assert found == strided


@pytest.mark.parametrize(("fsdp", "expert"), list(product([16, 64, 256, 512], [1, 8, 16])))
def test_the_largest_product_that_is_named_divides_and_the_next_power_of_two_does_not(fsdp, expert):
    case = Case(
        name="SW000",
        model="deepseek3-671b",
        layout="ep",
        neighbour={},
        options={"mesh_sizes": {"fsdp": fsdp, "expert": expert}, "batch": fsdp * expert},
    )
    plan = make_plan(request(case))
    have = fsdp * expert
    refused = {f.tensor for f in plan.findings if f.code == "SW114" and f.severity == "error"}
    rows = {w.name: w for w in plan.request.table.weights}
    replicated = {
        t.name
        for t in plan.weights
        if rows[t.name].storage
        and t.component != "moe"
        and all(rows[t.name].size(n) % have for n in rows[t.name].storage)
    }
    assert refused <= replicated
    assert bool(refused) == bool(replicated)
    for finding in plan.findings:
        if finding.tensor in refused and finding.code == "SW114":
            named = int(finding.needed.split("at most ")[1].split(";")[0])
            sizes = [rows[finding.tensor].size(n) for n in rows[finding.tensor].storage]
            assert any(size % named == 0 for size in sizes)
            assert have % named == 0


def test_a_fix_that_changes_a_role_takes_out_the_option_that_the_old_role_had() -> None:
    """'optimizer: shard' is of the replicas in 'logits': without them, a layout that still had it would not be read."""
    text = "name: mine\nmesh: {a: 8}\nroles:\n  a: {elsewhere: fsdp, moe: expert, logits: data, optimizer: shard}\n"
    case = Case(name="SW101", model="deepseek3-test", layout=text, neighbour={}, options={"batch": 8, "length": 128})
    [finding] = [one for one in findings(case) if one.code == "SW101" and "'a'" in one.where]
    assert finding.fix == "a: {elsewhere: fsdp, moe: expert} under 'roles'"
    after = findings(typed(case, finding.fix))
    assert after
    assert not [one for one in after if one.severity == "error" or one.code == "SW101"]


def test_a_fix_beyond_a_bound_is_none() -> None:
    """There are no axes of more than 2^20 devices, on which a step would be tried that does not fit on so many."""
    chip = Chip(name="a small chip", usable_bytes=2**20, source="here")
    options = {"mesh_sizes": {"fsdp": 2**20}, "devices": 2**20, "batch": 2**20, "length": 128, "chip": chip}
    case = Case(name="SW312", model="llama3-test", layout="fsdp", neighbour={}, options=options)
    [finding] = [one for one in findings(case) if one.code == "SW312"]
    assert not finding.fix

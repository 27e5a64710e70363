"""The numbers of findings against sums over the table, and the severities on both sides of every threshold."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from time import process_time

import pytest

from shardwright import load_layout, make_plan
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import located
from shardwright.core.findings.thresholds import (
    MEMORY_WARNING_SHARE,
    OVERSHARDED_ELEMENTS,
    PADDING_WARNING_SHARE,
    REPLICATED_ERROR_SHARE,
    REPLICATED_WARNING_SHARE,
)
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.wording import bytes_text, percent, product
from shardwright.core.mesh.divisors import divisors, nearest_divisors, nearest_multiples
from shardwright.core.model.table import Initializer, ModelTable, Weight
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.resolution.request import Chip, Request
from shardwright.models import build
from tests.golden.findings_case import Case, request


def plan(model: str, layout: str, **options) -> Plan:
    return make_plan(request(Case(name="SW000", model=model, layout=layout, neighbour={}, options=options)))


def of(found: Plan, code: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.code == code]


def with_unlisted(table: ModelTable, share: float) -> ModelTable:
    """With one more weight that has no storage dim, and that share of all parameters."""
    others = sum(w.num_parameters for w in table.weights)
    size = round(others * share / (1 - share))
    weight = Weight(
        name="extra",
        component="mlp",
        logical_axes=("norm",),
        shape=(size,),
        initializer=Initializer(kind="zeros"),
        contracted=(),
    )
    return replace(table, weights=(*table.weights, weight))


@pytest.mark.parametrize(
    ("share", "severity"),
    [(0.008, None), (0.011, "warning"), (0.048, "warning"), (0.052, "error"), (0.5, "error")],
)
def test_severity_of_replicated_weights_depends_on_their_share(share, severity):
    table = with_unlisted(build("llama3-test"), share)
    request = Request(layout=load_layout("fsdp"), table=table, batch=8, length=128, devices=8)
    found = [f for f in make_plan(request).findings if f.code == "SW101"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if found:
        # The norms of the layers are replicated as well, 0.05% of the bytes.
        total = sum(w.num_parameters for w in table.weights) * 4
        replicated = sum(w.num_parameters for w in table.weights if not w.storage) * 4
        assert found[0].found.startswith(
            f"{bytes_text(replicated, like=total)} of {bytes_text(total)} of weights ({percent(replicated / total)}) "
            "replicated over fsdp 8"
        )


@pytest.mark.parametrize(("moments", "states"), [("float32", 4), ("bfloat16", 3)])
def test_replicas_cost_what_sharding_would_save_with_gradients_and_moments(moments, states):
    found = plan("llama3-8b", "hsdp", devices=16, moments_dtype=moments)
    (finding,) = of(found, "SW101")
    parameters = build("llama3-8b").num_parameters
    norms = sum(w.num_parameters for w in build("llama3-8b").weights if not w.storage)
    saved = ((parameters - norms) / 8 + norms) * 4 / 2
    assert finding.severity == "info"
    assert finding.cost == (
        f"{bytes_text(saved)} a device more than if sharded, {bytes_text(saved * states)} with gradient and moments"
    )


@pytest.mark.parametrize(
    ("model", "entry", "fix"),
    [
        ("llama3-test", "{elsewhere: data, mlp: data}", "fsdp"),
        ("mixtral-test", "{elsewhere: idle, attention: idle, moe: expert}", "{elsewhere: fsdp, moe: expert}"),
    ],
)
def test_a_fix_replaces_a_replicating_role_also_where_it_is_named(model, entry, fix):
    found = of(plan(model, f"name: m\nmesh: {{a: 4}}\nroles:\n  a: {entry}\n"), "SW101")
    assert f"a: {fix} under 'roles'" in {finding.fix for finding in found}


def test_memory_is_compared_with_the_chip_on_both_sides_of_the_warning():
    total = plan("llama3-test", "fsdp", devices=8).memory.total_bytes_per_device
    warn = MEMORY_WARNING_SHARE.value
    for usable, severity in (
        (total - 1, "error"),
        (total, "warning"),
        (total / warn - 1, "warning"),
        (total / warn + 1, None),
    ):
        chip = Chip(name="small", usable_bytes=int(usable), source="a test")
        found = of(plan("llama3-test", "fsdp", devices=8, chip=chip), "SW312")
        assert [f.severity for f in found] == ([severity] if severity else [])


def test_memory_table_has_the_plans_own_numbers():
    chip = Chip(name="small", usable_bytes=1 << 20, source="a test")
    found = plan("llama3-test", "fsdp", devices=8, chip=chip)
    memory = found.memory
    lines = of(found, "SW312")[0].found.split("\n")
    rows = [memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes]
    total = memory.total_bytes_per_device
    assert lines[0].startswith(bytes_text(total))
    assert [line.split(maxsplit=1)[1] for line in lines[1:]] == [bytes_text(row, like=total) for row in rows]


@pytest.mark.parametrize(("fsdp", "warned"), [(256, False), (512, True)])
def test_a_storage_dim_with_one_element_left_is_a_warning(fsdp, warned):
    found = of(plan("deepseek3-671b", "fsdp", mesh_sizes={"fsdp": fsdp}, batch=fsdp), "SW114")
    assert [f.severity for f in found] == (["warning"] if warned else [])
    assert 512 / fsdp < OVERSHARDED_ELEMENTS.value if warned else 512 / fsdp >= OVERSHARDED_ELEMENTS.value


@pytest.mark.parametrize(
    ("embed", "mesh", "fix"),
    [
        # 24 is the largest product that divides 264 = 8 x 33: the largest axis is reduced, to what the others leave of it.
        (264, {"fsdp": 8, "data": 8, "context": 12}, "--mesh context=3,data=32"),
        (264, {"context": 8, "data": 8, "fsdp": 12}, "--mesh fsdp=3,data=32"),
        # Without replicas to take the devices it is the largest size that divides: 4 x 6, not 2 x 12.
        (264, {"context": 4, "fsdp": 12}, "--mesh fsdp=6"),
        # 12 and 6 do not divide 256.
        (256, {"fsdp": 12}, "--mesh fsdp=4"),
    ],
)
def test_the_largest_axis_is_reduced_where_no_storage_dim_divides(embed, mesh, fix):
    layout = {"name": "mine", "mesh": mesh, "roles": {axis: axis for axis in mesh}}
    table = build("llama3-test", {"embed": str(embed)})
    request = Request(layout=read_layout(located(layout)), table=table, batch=96 * 8, length=96)
    (found,) = of(make_plan(request), "SW114")
    assert (found.severity, found.fix) == ("error", fix)


@pytest.mark.parametrize(("size", "severity"), [(65, "warning"), (71, "info"), (72, None)])
def test_uneven_shards_are_a_warning_from_a_tenth_on(size, severity):
    table = build("llama3-test", {"mlp": str(size)})
    request = Request(layout=load_layout("fsdp"), table=table, batch=8, length=128, devices=8, engine="torch")
    found = [f for f in make_plan(request).findings if f.code == "SW104" and "'mlp'" in f.where]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if found:
        more = -(-size // 8) * 8 / size - 1
        assert (more >= PADDING_WARNING_SHARE.value) == (severity == "warning")
        assert found[0].cost.startswith(percent(more))


@pytest.mark.parametrize(
    ("vocab", "held", "severity"), [(2049, 2052, "info"), (37, 40, "info"), (36, 36, None), (5, 8, "warning")]
)
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_padded_vocabulary_is_a_warning_from_a_tenth_on(engine, vocab, held, severity):
    table = build("llama3-test", {"vocab": str(vocab)})
    request = Request(
        layout=load_layout("tp"), table=table, batch=8, length=128, mesh_sizes={"tensor": 4, "data": 2}, engine=engine
    )
    found = make_plan(request)
    padded = [finding for finding in of(found, "SW104") if "'vocab'" in finding.where]
    # The embedding and the logits' kernel are padded alike, so it is said once.
    assert [finding.severity for finding in padded] == ([severity] if severity else [])
    assert not found.errors
    for name, logical_axis in (("embedding.tokens", "vocab"), ("logits.kernel", "vocab"), ("logits.scores", "vocab")):
        row = found.by_name[name]
        place = row.in_use.logical_axes.index(logical_axis)
        assert (row.shape[place], row.saved_shape[place]) == (held, vocab)
        assert row.to_json().get("unpadded_shape") == (list(row.saved_shape) if severity else None)
        others = [size for number, size in enumerate(row.shape) if number != place]
        sharded = prod(others) // (2 if row.kind == "activation" else 1)
        assert row.bytes_per_device == held // 4 * sharded * 4
    if padded:
        assert padded[0].cost.startswith(percent(held / vocab - 1))
        assert held / vocab - 1 < PADDING_WARNING_SHARE.value or severity == "warning"


@pytest.mark.parametrize(
    ("engine", "vocab", "found", "cost"),
    [
        (
            "jax",
            257,
            "padded to 258 in memory, never in a checkpoint",
            "0.389% more memory and compute for this tensor",
        ),
        (
            "torch",
            257,
            "padded to 258 in memory, never in a checkpoint; shards of 33 at most",
            "0.389% more memory and compute for this tensor, and 2.33% more bytes in each gather",
        ),
        ("torch", 264, None, None),
        (
            "torch",
            263,
            "padded to 264 in memory, never in a checkpoint",
            "0.38% more memory and compute for this tensor",
        ),
    ],
)
def test_a_padded_vocabulary_that_is_stored_unevenly_is_one_finding(engine, vocab, found, cost):
    table = build("llama3-test", {"vocab": str(vocab)})
    sizes = {"fsdp": 4, "tensor": 2}
    request = Request(layout=load_layout("fsdp-tp"), table=table, batch=8, length=128, mesh_sizes=sizes, engine=engine)
    padded = [finding for finding in of(make_plan(request), "SW104") if "'vocab'" in finding.where]
    assert [(one.found.partition(": ")[2], one.cost) for one in padded] == ([(found, cost)] if found else [])


def test_a_users_own_vocabulary_is_not_padded():
    table = replace(build("llama3-test", {"vocab": "2049"}), owner="users", architecture=None)
    request = Request(layout=load_layout("tp"), table=table, batch=8, length=128, mesh_sizes={"tensor": 4, "data": 2})
    found = make_plan(request)
    assert found.by_name["embedding.tokens"].shape == (2049, 256)
    assert [finding.code for finding in found.errors] == ["SW107"]


def test_thresholds_are_in_order():
    assert 0 < REPLICATED_WARNING_SHARE.value < REPLICATED_ERROR_SHARE.value < 1


def test_choice_lists_every_option_cheapest_first_with_its_bytes():
    text = "name: m\nmesh: {fsdp: 2, expert: 4}\nroles: {fsdp: fsdp, expert: {elsewhere: fsdp, moe: expert}}\nmove: {moe: auto}\n"
    found = plan("mixtral-8x7b", text)
    (choice,) = found.choices
    (finding,) = of(found, "SW105")
    costs = sorted(choice.wire_bytes.items(), key=lambda item: item[1])
    lines = finding.found.split("\n")[1:]
    assert [line.split()[0] for line in lines] == [option for option, _ in costs]
    assert [line.split(maxsplit=1)[1] for line in lines] == [bytes_text(b, like=costs[-1][1]) for _, b in costs]


def test_keys_that_a_row_for_each_device_would_save_are_the_plans_own_collectives():
    found = plan("deepseek3-671b", "ep-as-cp", devices=128, batch=128, mesh_sizes={"expert": 8})
    latent = {"attention.latent", "attention.latent_attended"}
    keys = sum(c.bytes_per_device * c.count_per_step for c in found.collectives if latent & set(c.tensors))
    finding = of(found, "SW121")[1]
    assert finding.cost.startswith(bytes_text(keys))
    assert keys > 0


def test_a_plan_without_faults_is_checked_in_far_less_than_a_tenth_of_a_second():
    question = request(
        Case(
            name="SW000",
            model="deepseek3-671b",
            layout="ep-as-cp",
            neighbour={},
            options={"mesh_sizes": {"fsdp": 16, "expert": 8}},
        )
    )
    times = []
    for _ in range(5):
        start = process_time()
        make_plan(question)
        times.append(process_time() - start)
    assert min(times) < 0.1


def test_checks_make_no_second_plan_where_nothing_needs_a_fix():
    from shardwright.core.checks import check

    question = request(
        Case(
            name="SW000",
            model="deepseek3-671b",
            layout="ep-as-cp",
            neighbour={},
            options={"mesh_sizes": {"fsdp": 16, "expert": 8}},
        )
    )
    planned = []
    check(resolve(question), lambda changed: planned.append(changed) or resolve(changed))
    assert planned == []


@pytest.mark.parametrize("number", [1, 2, 12, 97, 129_280])
def test_divisors_and_those_nearest(number):
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]
    nearest = nearest_divisors(number, 10, 3)
    assert set(nearest) <= set(divisors(number))
    left = set(divisors(number)) - set(nearest)
    assert all(abs(n - 10) <= abs(d - 10) for n in nearest for d in left)


def test_nearest_multiples_are_on_both_sides():
    for factor in range(1, 9):
        for number in range(1, 40):
            multiples = nearest_multiples(factor, number)
            assert all(m % factor == 0 and m >= 1 for m in multiples)
            assert max(multiples) >= number
            assert len(multiples) == 1 or multiples[0] <= number


def test_products_name_only_axes_that_are_larger_than_one():
    mesh = plan("llama3-test", "fsdp-tp", devices=8).mesh
    assert product(mesh, mesh.names) == "fsdp 4 x tensor 2 = 8"
    assert prod(mesh.shape.values()) == 8


def test_one_expert_left_is_no_dim_sharded_too_finely():
    found = plan("mixtral-test", "shard-exp-on-fsdp", mesh_sizes={"fsdp": 4, "expert": 2})
    (gate,) = [t for t in found.weights if t.name == "layers.moe.gate"]
    assert str(gate.spec).split()[0] == "experts/expert/fsdp"
    assert of(found, "SW114") == []


@pytest.mark.parametrize(
    ("layout", "sizes", "batch"),
    [
        ("fsdp", {"fsdp": 8}, 8),
        ("hsdp", {"data": 4, "fsdp": 2}, 8),
        ("hsdp", {"data": 2, "fsdp": 4}, 8),
        ("fsdp-tp", {"fsdp": 4, "tensor": 2}, 8),
        ("cp", {"fsdp": 2, "context": 4}, 8),
        ("ep", {"fsdp": 2, "expert": 4}, 8),
        ("ep-as-cp", {"fsdp": 2, "expert": 4}, 8),
        ("ep-as-cp", {"fsdp": 2, "expert": 4}, 4),
    ],
)
def test_layouts_that_are_trained_on_eight_devices_have_no_error(layout, sizes, batch):
    for model in ("deepseek3-test", "mixtral-test", "llama3-test"):
        assert plan(model, layout, mesh_sizes=sizes, batch=batch, length=128).errors == ()


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_split_head_is_one_finding_for_weights_and_activations_together(engine):
    found = plan("mixtral-test", "tp", devices=8, engine=engine)
    assert [f.code for f in found.errors] == ["SW107"]
    assert of(found, "SW104") == []

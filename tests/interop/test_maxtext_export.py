"""Layouts as MaxText's rules and back: Flax resolves each weight to the plan's sharding at rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax.linen import logical_to_mesh_axes

from shardwright import FindingsError, InputError, Request, load_layout, make_plan
from shardwright.core.plan.plan import Plan
from shardwright.core.stages.assignment import assigned
from shardwright.core.stages.padded import padded_stack
from shardwright.core.stages.units import units_of
from shardwright.interop.maxtext.export import export_maxtext
from shardwright.interop.maxtext.importing import import_maxtext
from shardwright.interop.maxtext.reading.reading import parse_rule_file
from shardwright.interop.maxtext.resolution.tensors import StepShape, tensors_of
from shardwright.interop.maxtext.sources import MaxTextRequest
from shardwright.layouts import preset_names
from shardwright.models import build

MODELS = ("llama3-test", "mixtral-test", "deepseek3-test")
CONFLICTING = {("fsdp-as-dp-for-attn", model) for model in MODELS}
"""Layouts that would need two shardings of `embed`, which attention, dense layers and Mixtral's router share."""


def planned(layout: str, model: str) -> Plan:
    chosen = load_layout(layout)
    sizes = {axis: 1 if axis == "data" else 2 for axis, entry in chosen.mesh.items() if entry.size != "auto"}
    return make_plan(Request(layout=chosen, table=build(model), mesh_sizes=sizes, devices=8, batch=8, length=64))


def at_rest_by_flax(plan: Plan, text: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Each weight's axes by dim, as Flax resolves the rules of a text."""
    rules = parse_rule_file(text, "rules.yml").rules
    assert rules is not None
    pipelined = "stage" in plan.mesh.names
    found = {}
    for tensor in tensors_of(plan.request.table, StepShape(batch=8, length=64, pipelined=pipelined)):
        if tensor.kind == "weight":
            spec = logical_to_mesh_axes(tensor.names, tuple((line.name, line.axes) for line in rules)) or ()
            shardings = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
            found[tensor.name] = tuple(
                axes for dim, axes in zip(tensor.dims, shardings, strict=True) if dim != "layers" or axes
            )
    return found


def at_rest_by_plan(plan: Plan) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {row.name: tuple(dim.axes for dim in row.spec.dims) for row in plan.weights}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", preset_names())
def test_each_weight_is_stored_as_in_the_plan(layout, model):
    try:
        plan = planned(layout, model)
    except FindingsError:
        pytest.fail(f"{layout} has no plan for {model} on 8 devices")
    export = export_maxtext(plan)
    conflicts = [one for one in export.findings if one.severity == "error" and "two different shardings" in one.found]
    assert bool(conflicts) == ((layout, model) in CONFLICTING)
    if conflicts:
        assert conflicts[0].code == "SW123"
        wrong = {line.split(":")[0] for line in conflicts[0].found.splitlines()[1:]}
    else:
        wrong = set()
    by_flax, by_plan = at_rest_by_flax(plan, export.text), at_rest_by_plan(plan)
    assert {name for name in by_plan if by_plan[name] != by_flax[name]} == wrong


@pytest.mark.parametrize(
    ("layout", "model"), [("ep", "mixtral-test"), ("ep-as-cp", "deepseek3-test"), ("fsdp-tp", "llama3-test")]
)
def test_a_round_trip_gives_the_same_layout(layout, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = planned(layout, model)
    (tmp_path / "rules.yml").write_text(export_maxtext(plan).text)
    found = import_maxtext(MaxTextRequest(file="rules.yml", model=model, batch=8, length=64))
    assert not [finding for finding in found.findings if finding.severity == "error"]
    assert found.comparison is not None
    mine = found.comparison.layout
    for axis in mine.mesh:
        was, now = plan.request.layout.entries[axis], mine.entries[axis]
        # Input tokens share a logical name with the stream, which tensor shards here.
        present = plan.request.table.components - {"input"}
        assert {c: now.roles[c] for c in present} == {c: was.roles[c] for c in present}
    assert at_rest_by_plan(found.comparison.plan) == {
        name: tuple(tuple(axis for axis in axes if axis in mine.mesh) for axes in shardings)
        for name, shardings in at_rest_by_plan(plan).items()
    }


def test_masks_and_dispatched_tokens_both_have_the_experts_axis():
    """Two rules for rows, with the axis and without, after the experts' rule: masks use the first, dispatched tokens the second."""
    lines = [f"{line.name} {'/'.join(line.axes)}" for line in export_maxtext(planned("ep", "mixtral-test")).rules]
    assert [each for each in lines if each.startswith(("activation_exp ", "activation_batch_moe "))] == [
        "activation_exp expert",
        "activation_batch_moe data/fsdp/expert",
        "activation_batch_moe data/fsdp",
    ]


def test_an_axis_that_maxtext_lacks():
    layout = load_layout("fsdp")

    renamed = replace(
        layout,
        mesh={"data": layout.mesh["data"], "dp_shard": layout.mesh["fsdp"]},
        entries={"data": layout.entries["data"], "dp_shard": layout.entries["fsdp"]},
    )
    plan = make_plan(Request(layout=renamed, table=build("llama3-test"), devices=8, batch=8, length=64))
    with pytest.raises(InputError) as refused:
        export_maxtext(plan)
    assert str(refused.value).startswith("MaxText has no mesh axis 'dp_shard'. Known: diloco, data, ")
    assert str(refused.value).endswith("MaxText's name for an axis that is mostly 'fsdp' is 'fsdp'.")


def staged(stages: int = 3, **changes):
    plan = planned("pp", "llama3-test")
    request = replace(
        plan.request, mesh_sizes={"stage": stages, "fsdp": 1}, devices=None, microbatches=6, batch=12, **changes
    )
    return make_plan(request)


def with_entry(plan, **options):
    entry = replace(plan.request.layout.entries["stage"], **options)
    layout = replace(plan.request.layout, entries={**plan.request.layout.entries, "stage": entry})
    return make_plan(replace(plan.request, layout=layout))


def test_stages_are_written_as_settings_and_read_back(tmp_path):
    """6 layers are 3 stages x 2 layers x 1 repeat, or 3 x 1 x 2: the layers of each rank are those of MaxText's [repeat, stage, layer]."""
    for virtual in (1, 2):
        plan = with_entry(staged(), virtual=virtual)
        text = export_maxtext(plan).text
        lines = [
            f"num_layers_per_pipeline_stage: {2 // virtual}",
            f"num_pipeline_repeats: {virtual}",
            "num_pipeline_microbatches: 6",
        ]
        assert [line for line in text.splitlines() if line.startswith("num_")] == lines
        (tmp_path / "pp.yml").write_text(text)
        found = import_maxtext(MaxTextRequest(file=str(tmp_path / "pp.yml"), model="llama3-test", batch=12, length=64))
        assert found.pipeline is not None
        assert (found.pipeline.repeats, found.pipeline.layers_per_stage, found.pipeline.microbatches) == (
            virtual,
            2 // virtual,
            6,
        )
        assert found.comparison is not None
        entry = found.comparison.layout.entries["stage"]
        assert (entry.schedule, entry.virtual or 1) == ("circular", virtual)
        layers = np.arange(6).reshape(virtual, 3, 2 // virtual)
        stages = assigned(units_of(plan.request.table, 64, recomputed=True, ends=()), [2 // virtual] * 3 * virtual)
        own = padded_stack(plan.request.table, "layers", stages, 3, "loop").layers
        assert np.array_equal(np.array(own).reshape(3, -1), layers.transpose(1, 0, 2).reshape(3, -1))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"stages": "Et|tt|tttL"}, ["Et|tt|t*3L: MaxText's stages have 2 layers each"]),
        (
            {"microbatches": 4, "batch": 8},
            ["4 microbatches: MaxText's are a multiple of its 3 stages, and 3 by default"],
        ),
        ({}, []),
    ],
)
def test_what_maxtext_has_otherwise_is_said(changes: dict[str, object], found: list[str]):
    plan = make_plan(replace(staged().request, **changes))
    assert not plan.errors
    assert [one.found for one in export_maxtext(plan).findings if one.where == "stages of layout 'pp'"] == found


def test_what_maxtext_has_no_stages_for_is_refused():
    with pytest.raises(InputError) as refused:
        export_maxtext(with_entry(staged(), schedule="gpipe"))
    assert str(refused.value) == (
        "layout 'pp': schedule 'gpipe' cannot be said to MaxText, whose pipelines are 'circular'. Take 'schedule' out."
    )
    with pytest.raises(InputError) as refused:
        export_maxtext(staged(stages=8))
    assert str(refused.value) == (
        "layout 'pp': 6 layers in 8 stages cannot be said to MaxText: its stages have equally many layers, and at least one."
    )
    uneven = export_maxtext(staged(stages=4))
    assert "pipeline_parallel_layers: 4\nnum_layers_per_pipeline_stage: 1\n" in uneven.text
    [rest, _] = [one for one in uneven.findings if one.where == "stages of layout 'pp'"]
    assert rest.found == "2 layers outside of MaxText's pipeline, whose stages have equally many: every stage has them"


@pytest.mark.parametrize(
    ("lines", "found", "fix"),
    [
        (
            "num_layers_per_pipeline_stage: 4",
            "3 stages x 4 layers x 1 repeat = 12, of 6 layers",
            "Write 'num_layers_per_pipeline_stage: 2' and 'num_pipeline_repeats: 1'.",
        ),
        (
            "num_pipeline_repeats: 3",
            "3 stages x 1 layer x 3 repeats = 9, of 6 layers",
            "Write 'num_layers_per_pipeline_stage: 2' and 'num_pipeline_repeats: 1'.",
        ),
        ("num_pipeline_microbatches: 4", "4 microbatches for 3 stages", "Write 'num_pipeline_microbatches: 6'."),
    ],
)
def test_settings_that_maxtext_ends_with_an_error_for(tmp_path, lines: str, found: str, fix: str):
    text = export_maxtext(staged()).text
    kept = [line for line in text.splitlines() if not line.startswith("num_")]
    (tmp_path / "pp.yml").write_text("\n".join([*kept, lines]) + "\n")
    result = import_maxtext(MaxTextRequest(file=str(tmp_path / "pp.yml"), model="llama3-test", batch=12, length=64))
    wrong = [one for one in result.findings if one.code == "SW110"]
    assert [(one.severity, one.found, one.fix) for one in wrong] == [("error", found, fix)]
    assert result.pipeline is None


def test_a_vocabulary_that_the_plan_pads_is_no_rule():
    """The import of the rules has an error for them: MaxText does not pad."""
    table = build("llama3-test", {"vocab": "2047"})
    plan = make_plan(
        Request(
            layout=load_layout("tp"), table=table, mesh_sizes={"data": 2, "tensor": 4}, devices=8, batch=8, length=64
        )
    )
    assert not plan.errors
    found = [one for one in export_maxtext(plan).findings if one.severity == "error"]
    assert [one.found for one in found] == [
        "2047 vocabulary entries over tensor 4, which the plan pads or shards unevenly: MaxText ends with an error, or shards them "
        "over fewer axes (embedding.tokens and 1 more weight)"
    ]


def test_a_file_whose_rows_lie_on_the_experts_axis_names_it(tmp_path: Path) -> None:
    """MaxText counts rows by ``context_sharding`` where the file is no preset; 'context' is its default, and is not written."""
    texts = {name: export_maxtext(planned(name, "deepseek3-test")).text for name in ("ep-as-cp", "ep")}
    assert "context_sharding: expert\n" in texts["ep-as-cp"]
    assert "context_sharding" not in texts["ep"]
    file = tmp_path / "mine.yml"
    file.write_text(f"scan_layers: true\n{texts['ep-as-cp']}", encoding="utf-8")
    found = import_maxtext(MaxTextRequest(file=str(file), model="deepseek3-test"))
    assert [each for each in found.findings if "context_sharding" in each.where] == []
    file.write_text(file.read_text(encoding="utf-8").replace("context_sharding: expert\n", ""), encoding="utf-8")
    found = import_maxtext(MaxTextRequest(file=str(file), model="deepseek3-test"))
    assert [each.code for each in found.findings if "context_sharding" in each.where] == ["SW112"]

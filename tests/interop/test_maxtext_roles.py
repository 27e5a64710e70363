"""Rules as a layout in roles: planned for the model, and compared with the resolved rules, tensor by tensor."""

from __future__ import annotations

import pytest

from shardwright.core.layout.roles import ROLES
from shardwright.interop.layout_text import layout_text, same_layout
from shardwright.interop.maxtext.importing import MaxTextImport, import_maxtext
from shardwright.interop.maxtext.sources import MaxTextRequest
from shardwright.layouts import load_layout, preset_names
from tests.interop.rule_files import CLEAN, PRESET, edited, line

EMBED = line("embed", "fsdp", "context", "expert")


def imported(tmp_path, text: str, model: str, **sizes: int) -> MaxTextImport:
    (tmp_path / "rules.yml").write_text(text)
    return import_maxtext(
        MaxTextRequest(file=str(tmp_path / "rules.yml"), model=model, mesh_sizes=sizes, batch=16, length=64)
    )


def roles_of(found: MaxTextImport) -> list[str]:
    assert found.comparison is not None
    text = layout_text(found.comparison.layout)
    return [each.strip() for each in text[text.index("roles:") :].splitlines()[1:]]


def different(found: MaxTextImport) -> set[str]:
    assert found.comparison is not None
    assert found.comparison.compared > 20
    return {each.tensor for each in found.comparison.differences}


@pytest.mark.parametrize(
    ("edits", "sizes", "expected"),
    [
        ((), {"fsdp": 8, "expert": 1}, ["fsdp: fsdp"]),
        ((), {"data": 2, "fsdp": 4, "expert": 1}, ["data: data", "fsdp: fsdp"]),
        ((), {"fsdp": 2, "expert": 4}, ["fsdp:   fsdp", "expert: {elsewhere: fsdp, moe: expert}"]),
        # Other weights are replicas over the experts' axis.
        (
            [
                (EMBED, line("embed", "fsdp")),
                (line("embed_vocab", "fsdp", "context", "expert"), line("embed_vocab", "fsdp")),
            ],
            {"fsdp": 2, "expert": 4},
            ["fsdp:   fsdp", "expert: {elsewhere: data, moe: expert}"],
        ),
        # The experts' weights are gathered.
        (
            [(line("activation_exp", "expert"), line("activation_exp"))],
            {"fsdp": 2, "expert": 4},
            ["fsdp:   fsdp", "expert: {elsewhere: fsdp, moe: expert}", "move: {moe: weights}"],
        ),
        # Experts are sharded at rest over fsdp too, and the matrices of an expert are unsharded.
        (
            [(line("exp", "expert"), line("exp", "expert", "fsdp")), (line("embed_moe", "fsdp"), line("embed_moe"))],
            {"fsdp": 2, "expert": 4},
            [
                "fsdp:   fsdp",
                "expert: {elsewhere: fsdp, moe: expert}",
                "rules:",
                "moe: {experts: [expert, fsdp]}",
            ],
        ),
        ((), {"fsdp": 2, "tensor": 2, "expert": 1}, ["fsdp:   fsdp", "tensor: tensor"]),
        ((), {"context": 2, "fsdp": 2, "expert": 1}, ["fsdp:    fsdp", "context: {elsewhere: context, router: idle}"]),
    ],
)
def test_roles_of_mixtral(edits, sizes, expected, tmp_path):
    found = imported(tmp_path, edited(CLEAN, *edits), "mixtral-test", **sizes)
    if "context" not in sizes:
        assert roles_of(found) == expected
        assert different(found) == set()
    else:
        # The experts' products are repeated over context, which no role expresses; a finding reports it.
        assert different(found) & {"moe.dispatched", "moe.hidden", "moe.output"}
        assert "SW103" in {finding.code for finding in found.findings}


def test_experts_sharded_at_rest_over_an_axis_of_rows_too_are_no_fault(tmp_path):
    """Their weights are gathered over it, as any others; tokens are sent over the experts' own axis."""
    text = edited(
        CLEAN, (line("exp", "expert"), line("exp", "expert", "fsdp")), (line("embed_moe", "fsdp"), line("embed_moe"))
    )
    found = imported(tmp_path, text, "mixtral-test", fsdp=2, expert=4)
    assert not [finding for finding in found.findings if finding.severity == "error"]


def test_sequence_parallelism(tmp_path):
    """The axis that shards heads shards the residual stream's tokens; input tokens share their logical name."""
    text = edited(CLEAN, (line("activation_norm_length", "context"), line("activation_norm_length", "tensor")))
    found = imported(tmp_path, text, "llama3-test", fsdp=2, tensor=2, expert=1)
    assert roles_of(found) == ["fsdp:   fsdp", "tensor: {elsewhere: tensor, input: context, sequence_parallel: true}"]
    assert different(found) == set()


def test_stages(tmp_path):
    text = edited(CLEAN, ("mesh_axes: [data,", "mesh_axes: [stage, data,"), (line("layers"), line("layers", "stage")))
    found = imported(tmp_path, text, "llama3-test", stage=2, fsdp=2, expert=1)
    assert roles_of(found) == [
        "stage: {elsewhere: stage, embedding: data, logits: data, virtual: 3, schedule: circular}",
        "fsdp:  fsdp",
    ]
    # With stages MaxText shards the rows of embedding and logits over them first, whatever the rules are.
    assert found.comparison is not None
    ends = {each.tensor for each in found.comparison.differences if each.order}
    assert ends == {"embedding.output", "logits.scores"}
    # Here a stage reads all rows that it needs.
    assert different(found) == {*ends, "logits.input", "input.tokens"}


def test_dense_layers_of_deepseek_stay_outside_of_the_pipeline(tmp_path):
    text = edited(CLEAN, ("mesh_axes: [data,", "mesh_axes: [stage, data,"), (line("layers"), line("layers", "stage")))
    found = imported(tmp_path, text, "deepseek3-test", stage=3, fsdp=2, expert=1)
    staged = {placed.tensor.name.partition(".")[0] for placed in found.imported.weights if "stage" in placed.axes}
    assert staged == {"moe_layers"}
    differ = {name for name in different(found) if name.startswith("dense_layers")}
    assert len(differ) == len([w for w in found.imported.table.weights if w.name.startswith("dense_layers")])


LATENT = PRESET + line("q_lora", "fsdp") + line("kv_lora", "fsdp")


def test_one_weight_of_a_dim_that_two_share(tmp_path):
    """The query down-projection gives q_lora and the up-projection takes it: MaxText has two names for the dim, a layout one."""
    found = imported(tmp_path, LATENT, "deepseek3-test", fsdp=2, expert=4)
    assert roles_of(found)[:2] == ["fsdp:   fsdp", "expert: {elsewhere: context, moe: expert}"]
    assert "attention: {q_lora: [fsdp], kv_lora: [fsdp]}" in roles_of(found)
    assert different(found) == {"dense_layers.attention.q_down", "moe_layers.attention.q_down"}
    assert found.comparison is not None
    (first, _) = found.comparison.differences
    assert (first.rules, first.roles, first.order) == (
        "dense_layers embed/fsdp/expert q_lora_up_proj",
        "embed q_lora/fsdp",
        False,
    )
    (finding,) = [finding for finding in found.findings if finding.code == "SW123"]
    assert finding.found.startswith(f"2 of {found.comparison.compared} tensors that roles shard differently")
    without = imported(
        tmp_path,
        PRESET + line("q_lora", "fsdp", "expert") + line("kv_lora", "fsdp", "expert"),
        "deepseek3-test",
        fsdp=2,
        expert=4,
    )
    assert not {finding.code for finding in without.findings} & {"SW123"}


def test_another_order_on_a_dim_is_reported_as_only_that(tmp_path):
    text = edited(CLEAN, (EMBED, line("embed", "expert", "fsdp", "context")))
    found = imported(tmp_path, text, "llama3-test", fsdp=2, expert=4)
    assert found.comparison is not None
    assert {each.order for each in found.comparison.differences} == {True}
    assert "SW123" not in {finding.code for finding in found.findings}


def test_every_role_that_is_written_exists(tmp_path):
    for sizes in ({"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "expert": 4}):
        found = imported(tmp_path, CLEAN, "mixtral-test", **sizes)
        assert found.comparison is not None
        for entry in found.comparison.layout.entries.values():
            assert set(entry.roles.values()) <= set(ROLES)


def test_a_mesh_of_one_device_has_no_layout(tmp_path):
    found = imported(tmp_path, CLEAN, "llama3-test", fsdp=1, expert=1)
    assert found.comparison is None


@pytest.mark.parametrize("name", preset_names())
def test_a_layout_reads_back_from_its_text(name):
    layout = load_layout(name)
    again = same_layout(layout, "again.yaml", {})
    assert {axis: entry.roles for axis, entry in again.entries.items()} == {
        axis: entry.roles for axis, entry in layout.entries.items()
    }
    assert [(axis, entry.size) for axis, entry in again.mesh.items()] == [
        (axis, entry.size) for axis, entry in layout.mesh.items()
    ]
    assert (again.move_attention, again.move_moe) == (layout.move_attention, layout.move_moe)
    assert [e.weights for e in again.entries.values()] == [e.weights for e in layout.entries.values()]
    assert [e.sequence_parallel for e in again.entries.values()] == [
        e.sequence_parallel for e in layout.entries.values()
    ]

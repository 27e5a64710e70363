"""Sizes of the mesh axes as MaxText multiplies them."""

from __future__ import annotations

import pytest

from shardwright import FindingsError, InputError
from shardwright.interop.maxtext.importing import import_maxtext
from shardwright.interop.maxtext.reading.merging import merged
from shardwright.interop.maxtext.reading.reading import parse_rule_file
from shardwright.interop.maxtext.reading.sizes import Devices, sized
from shardwright.interop.maxtext.sources import MaxTextRequest
from tests.interop.rule_files import CLEAN, edited

AXES = "mesh_axes: [data, stage, fsdp, tensor, expert]\nlogical_axis_rules: []\n"


def sizes_of(text: str, devices: Devices) -> tuple[dict[str, int], dict[str, str]]:
    found = sized(merged([parse_rule_file(AXES + text, "rules.yml")]), devices)
    assert not found.findings
    return {axis: size for axis, size in found.mesh.shape.items() if size > 1}, dict(found.chosen)


@pytest.mark.parametrize(
    ("text", "devices", "sizes", "chosen"),
    [
        # fsdp takes the remaining devices of a slice and data the remaining slices, unless another axis has -1.
        ("ici_tensor_parallelism: 2\n", Devices(num=16), {"fsdp": 8, "tensor": 2}, {}),
        ("ici_tensor_parallelism: 2\n", Devices(num=32, slices=2), {"data": 2, "fsdp": 8, "tensor": 2}, {}),
        ("ici_fsdp_parallelism: 1\nici_expert_parallelism: -1\n", Devices(num=8), {"expert": 8}, {}),
        # A size is the product of both links.
        (
            "ici_data_parallelism: 2\nici_fsdp_parallelism: 4\ndcn_data_parallelism: 3\n",
            Devices(num=24, slices=3),
            {"data": 6, "fsdp": 4},
            {},
        ),
        # The key of axis stage has pipeline in its name.
        ("ici_pipeline_parallelism: 4\nici_fsdp_parallelism: 2\n", Devices(), {"stage": 4, "fsdp": 2}, {}),
        # Without a number of devices: those of the model's natural mesh.
        ("ici_expert_parallelism: 4\n", Devices(natural={"fsdp": 16}), {"fsdp": 4, "expert": 4}, {"--devices": "16"}),
        # Without any size, the model's natural mesh; the devices of axes that are not there go to fsdp.
        (
            "",
            Devices(natural={"context": 2, "fsdp": 4, "expert": 2}),
            {"fsdp": 8, "expert": 2},
            {"--mesh": "fsdp=8,expert=2"},
        ),
        # A user's size replaces both links of an axis.
        ("ici_tensor_parallelism: 2\n", Devices(sizes={"tensor": 4, "fsdp": 2}), {"fsdp": 2, "tensor": 4}, {}),
        ("dcn_fsdp_parallelism: 2\n", Devices(sizes={"fsdp": 8, "data": 1}), {"fsdp": 8}, {}),
    ],
)
def test_sizes(text, devices, sizes, chosen):
    assert sizes_of(text, devices) == (sizes, chosen)


def test_a_size_of_the_users_for_an_axis_that_is_not_there():
    with pytest.raises(InputError) as refused:
        sizes_of("", Devices(sizes={"tensr": 2}))
    assert str(refused.value) == "--mesh: the mesh has no axis 'tensr'. Did you mean 'tensor'?"


def test_axes_that_a_server_sets_have_size_1_and_no_key():
    text = "mesh_axes: [data, attn_dp, model, expert, attn_dp_expert]\nlogical_axis_rules: [[exp, [attn_dp_expert, expert]]]\n"
    served = merged([parse_rule_file(text + "ici_tensor_parallelism: 4\nici_attn_dp_parallelism: 2\n", "vllm.yml")])
    found = sized(served, Devices(num=4, natural={"fsdp": 8}))
    assert found.mesh.shape == {"data": 1, "attn_dp": 1, "model": 4, "expert": 1, "attn_dp_expert": 1}
    assert [(each.code, each.where) for each in found.findings] == [("SW111", "'ici_attn_dp_parallelism'")]
    with pytest.raises(InputError) as refused:
        sized(served, Devices(sizes={"attn_dp": 2}))
    assert str(refused.value) == "--mesh attn_dp is 2, and MaxText's meshes have it with size 1."


@pytest.mark.parametrize(
    ("size", "given", "place", "number"),
    [
        ("10_000_000_000_000", (), "mine.yml:4:23: 'ici_fsdp_parallelism'", "10,000,000,000,000"),
        ("2", ("dcn_data_parallelism=1048577",), "--given:1:23: 'dcn_data_parallelism'", "1,048,577"),
    ],
)
def test_a_size_above_the_maximum_is_refused_at_its_position(size, given, place, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(edited(CLEAN, ("parallelism: 2", f"parallelism: {size.replace('_', '')}")))
    with pytest.raises(InputError) as refused:
        import_maxtext(MaxTextRequest(file="mine.yml", model="llama3-test", given=given))
    assert (
        str(refused.value).splitlines()[0] == f"{place} is {number}, and must be at most 1,048,576. Give fewer devices."
    )


def test_a_dimension_above_the_maximum_is_refused_at_its_position(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(f"{CLEAN}base_num_decoder_layers: 16385\n")
    with pytest.raises(InputError) as refused:
        import_maxtext(MaxTextRequest(file="mine.yml"))
    assert str(refused.value).splitlines()[0] == (
        "mine.yml:45:26: 'base_num_decoder_layers' is 16,385, and must be at most 16,384. Give fewer layers."
    )


@pytest.mark.parametrize(("given", "place"), [(None, "mine.yml:4:23: "), ({"fsdp": 1 << 18}, "")])
def test_sizes_that_are_too_many_together_are_a_finding_in_the_users_file(given, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(edited(CLEAN, ("fsdp_parallelism: 2", f"fsdp_parallelism: {1 << 20}")))
    with pytest.raises(FindingsError) as refused:
        import_maxtext(
            MaxTextRequest(
                file="mine.yml", model="llama3-test", mesh_sizes={"expert": 32, **(given or {})} if given else None
            )
        )
    size, other, all_of_them = (1 << 18, 32, "8,388,608") if given else (1 << 20, 4, "4,194,304")
    (finding,) = refused.value.findings
    assert finding.text().splitlines()[1:] == [
        f"  where  {place}sizes of the mesh",
        f"  found  fsdp {size} x expert {other} = {all_of_them} devices",
        "  needed at most 1,048,576",
        "  fix    Give fewer devices.",
    ]


def test_a_name_that_our_notation_cannot_write_has_its_place_in_the_users_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(edited(CLEAN, ("mesh_axes: [data", "mesh_axes: ['my axis', data")))
    with pytest.raises(FindingsError) as refused:
        import_maxtext(MaxTextRequest(file="mine.yml", model="llama3-test", mesh_sizes={"my axis": 2}))
    assert {str(finding.position) for finding in refused.value.findings} == {"mine.yml:1:13"}

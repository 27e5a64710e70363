"""SW201 of stages: on links that are too slow for their transfers, and on fast ones that other axes need more."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.reading import read_layout
from shardwright.core.model.table import ModelTable
from shardwright.cost import price, read_machine
from shardwright.files import parse_yaml

NARROW = {"num_heads": "1", "num_kv_heads": "1", "head_dim": "16", "mlp": "16"}


def findings_of(table: ModelTable, mesh: str, chips: str = "h100:2x8", length: int = 2048) -> list[Finding]:
    machine = read_machine(chips)
    text = f"name: mine\nmesh: {mesh}\nroles:\n  stage: stage\n  fsdp: fsdp\n"
    request = sw.Request(
        layout=read_layout(parse_yaml(text, "mine.yaml")),
        table=table,
        batch=128,
        length=length,
        devices=machine.num_devices,
        microbatches=8,
        engine="torch",
        dtype="bfloat16",
        chip=machine.chip,
    )
    return [one for one in price(sw.make_plan(request), machine).findings if one.code == "SW201"]


def test_transfers_that_no_pass_hides():
    """One narrow layer a stage, each on another node than the next one."""
    table = sw.model_table("llama3-test", NARROW)
    [found] = findings_of(table, "{stage: 8, fsdp: auto}")
    assert found.severity == "warning"
    assert found.where == "axis 'stage' as stage"
    assert found.found.startswith("a transfer between stages takes 176 us, and the forward pass of stage 1 ")
    assert found.found.endswith(" us: no pass hides it")
    assert found.needed == "transfers that are shorter than passes: faster links, or fewer and larger stages"
    assert found.fix == "mesh: {fsdp: auto, stage: 8}"
    assert not findings_of(table, "{fsdp: auto, stage: 8}")


def test_stages_within_a_node_while_weights_are_gathered_over_two():
    table = sw.model_table("llama3-8b", {"num_layers": "6"})
    [found] = findings_of(table, "{fsdp: auto, stage: 4}", length=8192)
    assert found.severity == "warning"
    assert found.found == "stage 4 is within one node, where links are fast, and 'fsdp' leaves it: 2 nodes"
    assert found.needed == "stages across nodes: they send the least"
    # It would end the finding, and make the step longer: only two nodes share the gathers.
    assert not found.fix
    assert found.tried.startswith("the change that would end this is not faster by this plan: ")
    assert not findings_of(table, "{stage: 4, fsdp: auto}", length=8192)


@pytest.mark.parametrize("mesh", ["{stage: 4, fsdp: auto}", "{fsdp: auto, stage: 4}"])
def test_on_one_node_all_links_are_alike(mesh: str):
    assert not findings_of(sw.model_table("llama3-8b", {"num_layers": "6"}), mesh, chips="h100:1x8", length=8192)

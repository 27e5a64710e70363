"""What a command line of MaxText's says: pasted or after ``--given``, with its sizes, its presets, and decoders without a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from shardwright.cli.main import main
from shardwright.interop.maxtext.reading.known_keys import KNOWN_KEYS
from shardwright.interop.maxtext.reading.presets import PRESETS, known_preset
from shardwright.interop.maxtext.reading.reading import KINDS
from shardwright.layouts import load_layout
from tests.interop.maxtext_facts import FACTS
from tests.interop.rule_files import CLEAN

SIZES = "ici_fsdp_parallelism: 2\nici_expert_parallelism: 4\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.yml").write_text(CLEAN.replace(SIZES, ""), encoding="utf-8")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "mixtral-test") -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of an import."""
    options = ("--model", model) if model else ()
    code = main(["import", "maxtext", "rules.yml", *arguments, *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def larger(found: dict[str, Any]) -> dict[str, int]:
    return {axis: size for axis, size in found["mesh"].items() if size > 1}


def test_a_pasted_command_line_is_read_as_after_given(capsys):
    pairs = ("ici_fsdp_parallelism=2", "ici_expert_parallelism=4", "steps=100")
    assert run(capsys, *pairs) == run(capsys, "--given", *pairs)


def test_the_layout_names_the_file_of_the_rules(capsys):
    _, found = run(capsys, "ici_fsdp_parallelism=8")
    assert "about: 'The rules of rules.yml and a command line for mixtral-test.'" in found["layout"]


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        (("compile_topology=v5p-32", "compile_topology_num_slices=2", "dcn_data_parallelism=2"), 32),
        (("compile_topology=v6e-16", "compile_topology_num_slices=1"), 16),
        (("num_slices=4", "dcn_data_parallelism=4", "ici_fsdp_parallelism=2"), 8),
    ],
)
def test_sizes_of_the_command_line_are_read_before_any_is_asked_for(given, devices, capsys):
    code, found = run(capsys, *given, model="llama3-test")
    assert code == 0, found
    size = 1
    for of_axis in larger(found).values():
        size *= of_axis
    assert size == devices


@pytest.mark.parametrize("mesh", ["data=2,fsdp=auto", "data=2,fsdp=auto,expert=2"])
def test_an_open_axis_takes_the_remaining_devices(mesh, capsys):
    _, found = run(capsys, "--mesh", mesh, "--devices", "16")
    sizes = {"data": 2, "fsdp": 8} if "expert" not in mesh else {"data": 2, "fsdp": 4, "expert": 2}
    assert larger(found) == sizes


def test_an_open_axis_of_a_layout_takes_the_remaining_devices(capsys):
    main(["plan", "llama3-test", "--layout", "hsdp", "--mesh", "data=2,fsdp=auto", "--devices", "8", "--json"])
    assert json.loads(capsys.readouterr().out)["mesh"] == {"data": 2, "fsdp": 4}
    assert main(["plan", "llama3-test", "--layout", "hsdp", "--mesh", "data=2,fsdb=auto", "--devices", "8"]) == 1
    assert "fix    --mesh data=2,fsdp=auto" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_without_its_file_is_known(name, capsys):
    """Its rules of weights are those that MaxText has, and its roles those of the layout with its name."""
    preset = known_preset(name)
    assert preset is not None
    facts = FACTS["presets"][name]
    weights = {rule[0] for rule in facts["rules"]}
    rules = [[rule.name, *rule.axes] for rule in preset.rules or () if rule.name in weights]
    assert [axis.value for axis in preset.mesh_axes or ()] == facts["mesh_axes"]
    assert rules == facts["rules"]
    sizes = ("ici_fsdp_parallelism=2", "ici_expert_parallelism=4")
    code, found = run(capsys, "sparse_matmul=true", f"custom_mesh_and_rule={name}", *sizes, model="deepseek3-671b")
    assert not [each for each in found["findings"] if "context_sharding" in each["where"]]
    if name == "ep-as-cp":
        assert code == 0
        entries = load_layout(name).entries
        assert found["layout"].count("expert: {elsewhere: context, moe: expert") == 1
        assert entries["expert"].roles["attention"] == "context"


def test_its_own_preset_imports_without_an_error(capsys, here):
    """MaxText's base has ``context_sharding: context``, which the preset's rules replace on purpose."""
    (here / "rules.yml").write_text(CLEAN, encoding="utf-8")
    code, found = run(capsys, "custom_mesh_and_rule=ep-as-cp", "sparse_matmul=true", model="deepseek3-671b")
    assert (code, [each["where"] for each in found["findings"] if each["severity"] == "error"]) == (0, [])
    assert not [each for each in found["findings"] if "context_sharding" in each["where"]]


def test_its_own_preset_gathers_the_input_of_grouped_attention(capsys, here):
    """It has no rule for the length of that input, which Flax then leaves unsharded; latent attention names another length."""
    (here / "rules.yml").write_text(CLEAN, encoding="utf-8")
    preset = (
        "custom_mesh_and_rule=ep-as-cp",
        "sparse_matmul=true",
        "ici_fsdp_parallelism=2",
        "ici_expert_parallelism=4",
    )
    known = known_preset("ep-as-cp")
    assert known is not None
    rules = tuple((rule.name, rule.axes) for rule in known.rules or ())
    for model, length, sharded in (
        ("mixtral-8x7b", "activation_input_length_attn", None),
        ("deepseek3-671b", "activation_length", "expert"),
    ):
        by_flax = logical_to_mesh_axes(("activation_batch_attn", length), rules)
        assert by_flax == PartitionSpec(("data", "fsdp"), sharded)
        _, found = run(capsys, *preset, model=model)
        errors = [each for each in found["findings"] if each["severity"] == "error"]
        assert [each["code"] for each in errors] == ([] if sharded else ["SW101"])
        if errors:
            assert "attention.input over 'expert'" in errors[0]["where"]
            assert errors[0]["fix"] == "Write '[activation_input_length_attn, [expert]]'."


def test_every_key_that_is_read_is_one_that_maxtext_has():
    assert {key.partition(".")[0] for key in KINDS} - KNOWN_KEYS == set()
    of_files = {key for keys in FACTS["files"].values() for key in keys if not key.endswith("_parallelism")}
    # The recorded facts of a file add these two.
    assert {key.partition(".")[0] for key in of_files} - KNOWN_KEYS == {"parameters", "rules"}


QWEN = ("decoder_block=qwen3", "base_emb_dim=64", "ici_fsdp_parallelism=2", "ici_expert_parallelism=4")


def test_rules_of_a_decoder_without_a_table_are_read_by_names(capsys):
    code, found = run(capsys, *QWEN, "load_balance_loss_weight=0.1", model="")
    assert code == 1
    assert found["weights_by_name"]["attention.q"] == "layers embed/fsdp/expert q_heads kv"
    assert found["weights_by_name"]["logits.kernel"] == "embed_vocab/fsdp/expert vocab"
    (error,) = [each for each in found["findings"] if each["severity"] == "error"]
    assert "decoder 'qwen3' has norms of queries and keys, which no table of ours has." in error["found"]
    assert "--like llama3-8b" in error["fix"]
    assert [each["where"].split(": ")[-1] for each in found["findings"]][1:] == ["'load_balance_loss_weight'"]
    main(["import", "maxtext", "rules.yml", *QWEN])
    assert "layers embed/fsdp/expert q_heads kv" in capsys.readouterr().out


def test_the_table_of_another_model_is_used_in_its_place(capsys):
    code, found = run(capsys, *QWEN, "--like", "llama3-test", model="")
    assert (code, found["model"]) == (0, "llama3-test")
    assert any("in place of those of rules" in each["found"] for each in found["findings"])
    assert main(["import", "maxtext", "rules.yml", "--like", "llama3-test", "--model", "llama3-test"]) == 2

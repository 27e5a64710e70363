"""`shardwright import`: its text, JSON and written file, and every refusal."""

from __future__ import annotations

import json

import pytest

from shardwright.cli.main import main
from shardwright.layouts import load_layout
from tests.interop.rule_files import CLEAN, PRESET, edited, line

ROWS_FIRST = edited(
    CLEAN,
    (line("activation_exp", "expert"), ""),
    (line("activation_batch_moe", "data", "fsdp"), line("activation_exp", "expert")),
)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "130")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["import", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_maxtext(here, capsys):
    (here / "rules.yml").write_text(CLEAN)
    code, out, err = run(capsys, "maxtext", "rules.yml", "--model", "mixtral-test")
    assert (code, err) == (0, "")
    head, rest = out.split("\n\n", 1)
    assert head == (
        "rules.yml\n"
        "  model       mixtral-test\n"
        "  mesh        fsdp 2 x expert 4 = 8 devices; of size 1: data, context, tensor\n"
        "  rules       38 lines for 37 names, resolved by Flax Linen\n"
        "  step        8 rows of 128 tokens\n"
        "  plan it     shardwright plan mixtral-test --layout rules.yaml --engine jax --batch 8 --length 128\n"
        "  its layout  --out rules.yaml writes it\n"
        "  by default  --batch 8 --length 128"
    )
    assert "    layers.moe.gate                    layers exp/expert embed_moe/fsdp mlp_moe        512 KiB\n" in rest
    row = next(text for text in rest.splitlines() if text.startswith("    dispatched "))
    assert row.split()[1:] == [
        "activation_exp/expert",
        "activation_batch_moe/fsdp",
        "_slots",
        "activation_embed_moe",
        "160",
        "KiB",
    ]
    assert (
        "in roles\n"
        "  name: rules\n"
        "  about: 'The rules of rules.yml for mixtral-test.'\n"
        "  mesh: {fsdp: 2, expert: 4}\n"
        "  roles:\n"
        "    fsdp:   fsdp\n"
        "    expert: {elsewhere: fsdp, moe: expert}\n"
        "\n"
        "29 of 29 tensors are sharded as the rules shard them.\n"
    ) in rest


def test_batch_major_dispatch_of_rules_like_the_default_ones(here, capsys):
    """The finding names the axis, the tensor, the rule and the cost, in the text and in the JSON."""
    (here / "rules.yml").write_text(ROWS_FIRST)
    arguments = ("maxtext", "rules.yml", "--model", "mixtral-8x7b", "--mesh", "fsdp=1,expert=8", "--length", "2048")
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert "error SW102: An axis shards at most one dim of any tensor." in out
    assert "move: {moe: weights}" in out
    code, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert code == 1
    (finding,) = [f for f in found["findings"] if f["code"] == "SW102" and f["severity"] == "error"]
    assert finding["tensor"] == "moe.dispatched"
    assert "'expert'" in finding["where"]
    assert "'activation_batch_moe' (line 8)" in finding["found"]
    assert finding["position"] == {"source": "rules.yml", "line": 8, "column": 5}
    assert finding["fix"] == "Write 'moe_dispatch_no_expert_sharding: true'."
    # 3 x 8 x 4096 x 14336 weights of 2 bytes; 2048 tokens x 2 experts x 1.25 x 4096 of 2 bytes, there and back.
    assert "gathers 2.62 GiB of experts' weights on each device" in finding["cost"]
    assert "is 80.0 MiB (tokens are fewer bytes)" in finding["cost"]


def test_json_of_maxtext(here, capsys):
    (here / "rules.yml").write_text(CLEAN)
    code, out, err = run(capsys, "maxtext", "rules.yml", "--model", "llama3-test", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == {
        *(
            "sources",
            "model",
            "mesh",
            "dialect",
            "batch",
            "length",
            "chosen",
            "not_read",
            "plan_it",
            "rules",
            "tensors",
        ),
        *("layout", "compared", "differences", "findings"),
    }
    assert found["mesh"] == {"data": 1, "fsdp": 2, "context": 1, "tensor": 1, "expert": 4}
    assert found["rules"][0] == {"name": "activation_exp", "axes": ["expert"], "source": "rules.yml", "line": 7}
    query = next(row for row in found["tensors"] if row["name"] == "layers.attention.q")
    assert (query["spec"], query["cuts"]) == ("layers embed/fsdp/expert q_heads kv", [[], ["fsdp", "expert"], [], []])


def test_base_preset_and_command_line(here, capsys):
    (here / "base.yml").write_text(CLEAN)
    (here / "model.yml").write_text("custom_mesh_and_rule: mine\n")
    (here / "custom_mesh_and_rule").mkdir()
    (here / "custom_mesh_and_rule" / "mine.yml").write_text(PRESET)
    code, out, _ = run(
        capsys,
        *("maxtext", "model.yml", "--base", "base.yml", "--model", "mixtral-test", "--json"),
        *("--given", "ici_expert_parallelism=8", "ici_fsdp_parallelism=1", "--given", "context_sharding=expert"),
        *("--given", "run_name=mine", "base_output_directory=gs://there/a: b", "steps=10", "rl.num_generations=2"),
    )
    found = json.loads(out)
    assert found["not_read"] == ["run_name", "base_output_directory", "steps", "rl.num_generations"]
    assert found["sources"] == ["base.yml", "model.yml", "--given", "custom_mesh_and_rule/mine.yml"]
    assert found["mesh"] == {"data": 1, "fsdp": 1, "expert": 8}
    assert "expert: {elsewhere: context, moe: expert" in found["layout"]
    assert code == 0


def test_the_layout_that_is_written_is_one(here, capsys):
    (here / "rules.yml").write_text(CLEAN)
    code, _, _ = run(capsys, "maxtext", "rules.yml", "--model", "mixtral-test", "--out", "mine.yaml", "--json")
    assert code == 0
    layout = load_layout("./mine.yaml")
    assert {axis: entry.size for axis, entry in layout.mesh.items()} == {"fsdp": 2, "expert": 4}
    assert main(["plan", "mixtral-test", "--layout", "./mine.yaml"]) == 0
    assert [path.name for path in here.iterdir()] == ["rules.yml", "mine.yaml"]


def test_torchtitan(here, capsys):
    (here / "hsdp.toml").write_text(
        "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4\n"
    )
    code, out, err = run(capsys, "torchtitan", "hsdp.toml", "--out", "mine.yaml")
    assert (code, err) == (0, "")
    assert out == (
        "hsdp.toml\n"
        "  degrees  pp 1 x dp_replicate 2 x dp_shard 4 x cp 1 x tp 1 = 8 ranks; ep 1\n"
        "  mesh     dp_replicate 2 x dp_shard 4\n"
        "\n"
        "groups\n"
        "  group         ranks in the group of rank 0\n"
        "  dp_replicate  0, 4\n"
        "  dp_shard      0, 1, 2, 3\n"
        "  batch         0, 1, 2, 3, 4, 5, 6, 7\n"
        "  loss          0, 1, 2, 3, 4, 5, 6, 7\n"
        "  efsdp         0, 1, 2, 3\n"
        "\n"
        "in roles\n"
        "  name: hsdp\n"
        "  about: 'TorchTitan''s degrees, on its ranks.'\n"
        "  mesh: {dp_replicate: 2, dp_shard: 4}\n"
        "  roles:\n"
        "    dp_replicate: data\n"
        "    dp_shard:     fsdp\n"
        "\n"
        "findings: no findings\n"
    )
    assert load_layout("./mine.yaml").name == "hsdp"
    code, out, _ = run(capsys, "torchtitan", "hsdp.toml", "--model", "llama3-test", "--json")
    assert code == 0
    assert json.loads(out)["groups"]["dp_shard"] == [0, 1, 2, 3]


def test_hugging_face(here, capsys):
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "tp_plan": {"layers.*.mlp.experts.down_proj": "rowwise", "layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    }
    (here / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "huggingface", "config.json", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["layout"].endswith("roles:\n  tensor: {elsewhere: idle, moe: tensor}\n")
    assert (
        main(["plan", *found["command"].split(), "--layout", "fsdp", "--devices", "2", "--batch", "2", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["num_parameters"] == found["num_parameters"]
    code, out, _ = run(capsys, "huggingface", "config.json")
    assert "  plan it     shardwright plan mixtral-test --set num_layers=2 embed=64" in out


def test_the_command_of_a_config_plans_what_the_config_plans(here, capsys):
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (here / "config.json").write_text(json.dumps(config))
    _, out, _ = run(capsys, "huggingface", "config.json", "--json")
    plans = []
    for model in (json.loads(out)["command"].split(), ["config.json"]):
        assert main(["plan", *model, "--layout", "fsdp", "--mesh", "fsdp=2", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["dtype"] for plan in plans] == ["bfloat16", "bfloat16"]
    assert plans[0]["memory"] == plans[1]["memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("maxtext", "none.yml"), "none.yml: no such file."),
        (
            ("maxtext", "bad.yml"),
            "bad.yml:1:22: a rule is [name, axis], [name, [axis, axis]] or [name, []]; found 3 in",
        ),
        (("maxtext", "delta.yml"), "delta.yml: no 'mesh_axes'. Give the file that has them,"),
        (("maxtext", "other.yml"), "other.yml: not a MaxText rule file: it has no 'logical_axis_rules'."),
        (("maxtext", "clean.yml", "--base", "none.yml"), "none.yml: no such file."),
        (("maxtext", "clean.yml", "--preset", "delta.yml", "--model", "llama9"), "no model 'llama9'."),
        (("maxtext", "clean.yml", "--preset", "other.yml"), "other.yml: not a MaxText preset"),
        (
            ("maxtext", "clean.yml", "--model", "llama3-test", "--mesh", "fdsp=2"),
            "--mesh: the mesh has no axis 'fdsp'. Did you mean 'fsdp'?",
        ),
        (("maxtext", "clean.yml", "--mesh", "fsdp=0"), "--mesh fsdp is 0, and must be at least 1."),
        (
            ("maxtext", "clean.yml"),
            "clean.yml: no model is given for these rules: no 'model_name', and no",
        ),
        (("maxtext", "clean.yml", "--given", "steps=3", "steps=4"), "--given steps: duplicate. Keep one."),
        (
            ("maxtext", "clean.yml", "--given", "ici_fsdp_parallelism"),
            "--given 'ici_fsdp_parallelism' is not KEY=VALUE",
        ),
        (
            ("maxtext", "clean.yml", "--given", "mesh_axes=fsdp"),
            "--given:1:12: 'mesh_axes' is a list of names; found 'fsdp'.",
        ),
        (
            ("maxtext", "clean.yml", "--model", "llama3-test", "--devices", "9", "--slices", "2"),
            "9 devices do not make 2 slices of one size.",
        ),
        (("maxtext", "extends.yml"), "extends.yml:1:14: base_config 'base.yml' is neither next to this file nor in a"),
        (
            ("maxtext", "clean.yml", "--model", "llama3-test", "--out", "nowhere/x.yaml"),
            "nowhere/x.yaml: cannot be written: the folder nowhere does not exist.",
        ),
        (("torchtitan", "clean.yml"), "clean.yml:1:10: not TOML: "),
        (("torchtitan", "bad.toml", "--out", "x.yaml"), "--out x.yaml: there is no layout to write: "),
        (("huggingface", "bad.json"), "bad.json:1:1: not JSON: expecting value."),
        (("huggingface", "gpt2.json"), "gpt2.json:1:2: no family here has model_type 'gpt2'."),
    ],
)
def test_what_is_refused(here, capsys, arguments, message):
    files = {
        "clean.yml": CLEAN,
        "bad.yml": "logical_axis_rules: [3]\n",
        "delta.yml": f"logical_axis_rules:\n{line('norm')}",
        "other.yml": "steps: 3\n",
        "extends.yml": "base_config: base.yml\n",
        "bad.toml": "[parallelism]\ndata_parallel_shard_degree = 3\nexpert_parallel_degree = 2\n",
        "bad.json": "nothing",
        "gpt2.json": '{"model_type": "gpt2"}',
    }
    for name, text in files.items():
        (here / name).write_text(text)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"shardwright: {message}")
    assert {path.name for path in here.iterdir()} == set(files)
    code, out, _ = run(capsys, *arguments, "--json")
    assert json.loads(out)["error"]["message"].startswith(message)


def test_sizes_that_give_no_mesh_are_a_finding(here, capsys):
    (here / "rules.yml").write_text(CLEAN)
    code, out, err = run(capsys, "maxtext", "rules.yml", "--devices", "16", "--model", "llama3-test")
    assert (code, out) == (1, "")
    assert err.startswith("error SW106: ")


def test_hf_is_a_short_name(tmp_path, capsys):
    (tmp_path / "plan.json").write_text('{"layers.*.mlp.gate_proj": "colwise"}')
    outputs = []
    for name in ("huggingface", "hf"):
        code = main(["import", name, str(tmp_path / "plan.json"), "--model", "llama3-test"])
        outputs.append((code, capsys.readouterr()))
    assert outputs[0] == outputs[1]


def test_a_file_is_suggested_only_where_it_is_of_the_same_kind(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["import", "torchtitan", str(tmp_path / "config.toml")]) == 2
    assert capsys.readouterr().err == f"shardwright: {tmp_path / 'config.toml'}: no such file.\n"
    assert main(["import", "hf", str(tmp_path / "confg.json")]) == 2
    assert (
        capsys.readouterr().err
        == f"shardwright: {tmp_path / 'confg.json'}: no such file. Did you mean 'config.json'?\n"
    )

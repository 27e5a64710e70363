"""`shardwright export maxtext`: rules on stdout or in a file, none where a weight would be stored elsewhere, and refusals."""

from __future__ import annotations

import json

import pytest

from shardwright.cli.main import main

FSDP = """\
# Layout 'fsdp' for llama3-test, written by shardwright. A name may have several rules:
# where an axis of the first is taken in a tensor, the next one applies. Their order matters.
mesh_axes: [data, fsdp]
data_sharding: [[data, fsdp]]
ici_data_parallelism: 1
ici_fsdp_parallelism: 8
logical_axis_rules:
  - [vocab, []]
  - [embed_vocab, [fsdp]]
  - [norm, []]
  - [layers, []]
  - [embed, [fsdp]]
  - [q_heads, []]
"""


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rules_on_stdout_are_a_file_that_import_reads(here, capsys):
    assert main(["export", "maxtext", "fsdp", "--model", "llama3-test"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(FSDP)
    assert captured.err == ""
    (here / "rules.yml").write_text(captured.out)
    assert main(["import", "maxtext", "rules.yml", "--model", "llama3-test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"].endswith("roles:\n  fsdp: fsdp\n")
    assert found["differences"] == []


def test_a_file_is_written_and_the_json_has_its_text(here, capsys):
    arguments = [
        "export",
        "maxtext",
        "ep",
        "--model",
        "mixtral-test",
        "--mesh",
        "fsdp=2,expert=4",
        "--out",
        "rules.yml",
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (here / "rules.yml").read_text() == found["text"]
    assert set(found) == {"layout", "model", "mesh", "rules", "text", "compared", "findings"}


def test_no_file_where_rules_cannot_express_the_layout(here, capsys):
    code = main(["export", "maxtext", "fsdp-as-dp-for-attn", "--model", "llama3-test", "--out", "rules.yml"])
    captured = capsys.readouterr()
    assert (code, captured.out, list(here.iterdir())) == (1, "", [])
    assert captured.err.startswith("error SW123: What is translated to another language")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp"], "export: a layout is written for a model. Give one: --model mixtral-8x7b."),
        (["fdsp", "--model", "llama3-test"], "no layout is called 'fdsp'. Did you mean 'fsdp'?"),
        (["fsdp", "--model", "llama3-test", "--out", "no/x.yml"], "no/x.yml: cannot be written:"),
        (
            ["fsdp", "--model", "llama3-test", "--out", "/"],
            "/: cannot be written: Is a directory. Nothing was changed.",
        ),
    ],
)
def test_what_is_refused(here, capsys, arguments, message):
    assert main(["export", "maxtext", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"shardwright: {message}")
    assert list(here.iterdir()) == []


def test_a_policy_of_recomputation_is_said_to_torchtitan_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", "torchtitan", "fsdp", "--model", "llama3-8b", "--devices", "8", "--batch", "8", "--remat"]
    assert main([*command, "none,recompute=weights"]) == 0
    assert "activation_checkpoint=None," in capsys.readouterr().out
    assert main([*command, "dots"]) == 2
    assert capsys.readouterr().err == (
        "shardwright: --remat is 'dots', and TorchTitan has policies for all layers: full, none, and selective per operation. "
        "Give 'full' or 'keep=attention.queries,attention.values,attention.attended,mlp.gate' or 'none,recompute=weights'.\n"
    )

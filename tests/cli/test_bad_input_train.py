"""Errors of a user in a training run: one clear message, exit code 1 or 2, no traceback, no files left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from shardwright.cli.main import main

MODEL = ["llama3-test", "--set", "num_layers=1", "embed=64", "mlp=128", "--length", "32"]
FSDP = ["--layout", "fsdp", "--mesh", "fsdp=8"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def train(*options: str, layout: list[str] = FSDP) -> int:
    batch = [] if "--batch" in options else ["--batch", "8"]
    arguments = [*MODEL, *batch, *layout, "--steps", "4", "--warmup", "0", *options]
    return main(["train", *arguments, *([] if "--out" in options else ["--out", "out"])])


def assert_refused(capsys, message: str, *options: str, code: int = 2, layout: list[str] = FSDP) -> None:
    """The whole of stderr is the message; and where files are, they are as they were."""
    before = contents()
    assert train(*options, layout=layout) == code
    out, err = capsys.readouterr()
    assert err == message
    assert "Traceback" not in out + err
    assert contents() == before


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


def test_a_malformed_layout_is_shown_with_line_and_column(capsys) -> None:
    Path("mine.yaml").write_text("name: mine\nmesh: {fsdp: 8\nroles:\n  fsdp: fsdp\n")
    assert_refused(
        capsys,
        "shardwright: mine.yaml:3:6: not YAML: a ',' is missing before this, or the '}' that closes the bracket of line 2.\n"
        "    roles:\n"
        "         ^\n",
        layout=["--layout", "mine.yaml"],
    )


def test_a_missing_layout(capsys) -> None:
    assert_refused(
        capsys,
        "shardwright: no layout is called 'fspd'. Did you mean 'fsdp'? "
        "A layout of your own is given by its path, as in ./fspd.yaml.\n",
        layout=["--layout", "fspd"],
    )


def test_a_mesh_axis_that_does_not_exist(capsys) -> None:
    assert_refused(
        capsys,
        "error SW111: Every axis, role, component, logical axis and option is one that exists.\n"
        "  where  a mesh size for 'fdsp'\n"
        "  found  layout 'fsdp' has no mesh axis 'fdsp'\n"
        "  needed one of data, fsdp\n"
        "  fix    --mesh fsdp=8\n",
        code=1,
        layout=["--layout", "fsdp", "--mesh", "fdsp=8"],
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--batch", "6"], "found 6 rows over fsdp 8 needed at least 8 rows fix --batch 8"),
        (["--microbatches", "2"], "found 8 rows over fsdp 8, in 2 microbatches: 16 chunks needed at least 16 rows"),
        (["--microbatches", "3"], "found 8 rows over fsdp 8, in 3 microbatches: 24 chunks needed at least 24 rows"),
    ],
    ids=["rows", "rows of 2 microbatches", "rows of 3 microbatches"],
)
def test_rows_that_do_not_divide(options, found, capsys) -> None:
    before = contents()
    assert train(*options) == 1
    out, err = capsys.readouterr()
    assert err == "shardwright: the plan has errors, so nothing was started.\n"
    assert "error SW108: " in out
    assert found in " ".join(out.split())
    assert contents() == before


def test_too_few_devices(capsys) -> None:
    assert_refused(
        capsys,
        "shardwright: the mesh data 1 x fsdp 16 needs 16 devices; JAX sees 8 (cpu). Give the run 16 devices "
        "(--devices 16 simulates them on CPU), or smaller axes (--mesh).\n",
        "--batch",
        "16",
        layout=["--layout", "fsdp", "--mesh", "fsdp=16"],
    )


def test_one_device_where_two_are_needed_on_the_command_line(user_environment, tmp_path: Path) -> None:
    command = ["shardwright", "train", *MODEL, "--layout", "fsdp", "--mesh", "fsdp=2", "--steps", "1", "--out", "out"]
    environment = {**user_environment, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr == (
        "shardwright: the mesh data 1 x fsdp 2 needs 2 devices; JAX sees 1 (cpu). Give the run 2 devices "
        "(--devices 2 simulates them on CPU), or smaller axes (--mesh).\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--out", "s3://bucket/run/"],
            "--out s3://bucket/run: the metrics and the lock of a run need a folder of this machine. For its checkpoints give "
            "--checkpoints s3://bucket/run, and a local --out.",
        ),
        (
            ["--out", "out", "--checkpoints", "s3://key:a-secret@bucket/run"],
            "s3://...@bucket/run: this URL has a password or a key, which would be shown and stored. Give it where the store's "
            "client reads it: in the environment, or in fsspec's configuration file.",
        ),
    ],
)
def test_places_that_cannot_be(options: list[str], message: str, capsys) -> None:
    assert main(["train", *MODEL, "--layout", "fsdp", "--steps", "1", *options]) == 2
    assert capsys.readouterr() == ("", f"shardwright: {message}\n")
    assert contents() == {}


def test_missing_data(capsys) -> None:
    assert_refused(
        capsys,
        "shardwright: cannot read data from nowhere: No such file or directory. "
        "Give a text file, a folder, a JSONL file, or the word stdlib.\n",
        "--data",
        "nowhere",
    )


def test_data_that_is_not_text(capsys) -> None:
    Path("noise").write_bytes(b"text\n\xff\xfe\x00")
    assert_refused(
        capsys,
        "shardwright: noise is not UTF-8 text: byte 0xff at offset 5. Convert it, or move it out of the data.\n",
        "--data",
        "noise",
    )


def test_an_empty_corpus(capsys) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("")
    assert_refused(capsys, "shardwright: no text in texts: 1 documents, all empty\n", "--data", "texts")


def test_text_that_fills_no_row(capsys) -> None:
    Path("short.txt").write_text("hello\n")
    assert_refused(
        capsys,
        "shardwright: short.txt has 7 tokens (by tokenizer bytes), fewer than the 32 of one row. "
        "Give more text, or a shorter length.\n",
        "--data",
        "short.txt",
    )


def test_a_tokenizer_larger_than_the_vocabulary(capsys) -> None:
    words = {f"w{number}": number for number in range(3000)} | {"<unk>": 3000, "</s>": 3001}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")).save("big.json")
    assert_refused(
        capsys,
        "shardwright: tokenizer big.json has ids up to 3,001, so it needs a vocabulary of at least 3,002; "
        "the model's is 2,048. Enlarge the model's vocabulary, or use a smaller tokenizer.\n",
        "--tokenizer",
        "big.json",
    )


def test_bytes_larger_than_the_vocabulary(capsys) -> None:
    assert_refused(
        capsys,
        "shardwright: tokenizer bytes has ids up to 256, so it needs a vocabulary of at least 257; "
        "the model's is 128. Enlarge the model's vocabulary, or use a smaller tokenizer.\n",
        "--set",
        "vocab=128",
    )


@pytest.mark.parametrize("out", ["taken", "taken/run"])
def test_an_out_that_is_a_file(out: str, capsys, tmp_path: Path) -> None:
    Path("taken").write_text("mine")
    there = out if out == "taken" else tmp_path / "taken"
    assert_refused(
        capsys,
        f"shardwright: --out {out}: {there} is not a folder. Give a folder, or a name that is free.\n",
        "--out",
        out,
    )


def test_an_out_that_cannot_be_written(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shardwright.runs.metrics.journal.os.access", lambda *_: False)
    assert_refused(
        capsys, f"shardwright: --out out: {tmp_path} may not be written. Give a folder that may.\n", "--out", "out"
    )


def test_nothing_to_resume(capsys) -> None:
    assert_refused(
        capsys,
        "shardwright: --resume: there is no intact checkpoint under out. "
        "Give the --out of the run to go on with, or leave --resume out.\n",
        "--resume",
    )


def test_a_missing_tensorboard(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert_refused(
        capsys,
        "shardwright: --tensorboard needs the package tensorboardX. Install it: pip install 'shardwright[tensorboard]'.\n",
        "--tensorboard",
    )


def test_a_loss_that_is_no_number(capsys) -> None:
    assert train("--data", __file__, "--lr", "1e6", "--checkpoint-every", "1") == 1
    out, err = capsys.readouterr()
    # Norms keep the loss itself finite for some steps; its gradient overflows.
    message, _, advice = err.partition(", and both must be finite. ")
    assert re.fullmatch(r"shardwright: step 3: the loss is [\d.a-z]+ and the gradient's norm (nan|inf)", message)
    assert advice == (
        "This step was not saved. Begin again with a lower --lr (now 1e+06) or a longer --warmup (now 0), "
        "and another --out.\n"
    )
    assert "Traceback" not in out
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert sorted(path.name for path in Path("out/checkpoints").iterdir() if path.is_dir()) == [
        "step-00000001",
        "step-00000002",
    ]

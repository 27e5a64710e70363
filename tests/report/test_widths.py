"""At every width each view has every value whole: what it shows at 60 columns has the words of what it shows without a limit."""

from __future__ import annotations

import ast
import importlib
import io
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from shardwright import cli
from shardwright.checkpoint import Retention
from shardwright.cli.listing import LISTS
from shardwright.cli.main import main
from shardwright.cli.typed import output
from shardwright.layouts import load_layout
from shardwright.report.compile.compile_view import compile_view
from shardwright.report.interop.folders_view import converted_view
from shardwright.report.plan.findings_view import findings_list
from shardwright.report.text.terminal import View, to_text
from tests.checkpoint.states import save, small_state
from tests.cli.locks import LAYOUT, LOCKING, MOVED
from tests.conftest import ROOT
from tests.golden.compiled_case import findings_in
from tests.golden.compiled_case import plan_of as compiled_plan
from tests.golden.compiled_cases import COMPILED_CASES
from tests.golden.findings_case import findings
from tests.golden.findings_cases import CASES
from tests.interop.rule_files import CLEAN

WIDTHS = (60, 80, 100, 160)
UNLIMITED = 100_000
REPORT = ROOT / "src" / "shardwright" / "report"


def headers() -> set[str]:
    """The words of all columns' headers: a table that is stacked may leave out that of its first column."""
    words: set[str] = set()
    for path in REPORT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
                words |= set(node.value.split())
    return words


HEADERS = headers()
"""Words of short texts of the views themselves. No value is among them, but for a few words: numbers are kept."""


def words(text: str) -> Counter[str]:
    """Bars are as long as there is room for."""
    return Counter(word for word in text.split() if not re.fullmatch(r"[#^]+", word))


def faults(view: View) -> list[str]:
    """What is not whole, and lines that are too long though they could have been broken."""
    unlimited = words(drawn(view, UNLIMITED))
    wrong = []
    for width in WIDTHS:
        text = drawn(view, width)
        missing = unlimited - words(text)
        lost = [word for word in missing if word not in HEADERS or any(map(str.isdigit, word))]
        wrong += [f"{width} columns: {word!r} is not whole" for word in lost]
        before, roles, after = text.partition("\nin roles\n")
        for line in (before + after.partition("\n\n")[2] if roles else text).splitlines():
            if (
                len(line) > width
                and len(re.sub(r"(?<! ) (?:[KMGTP]iB|B|s|ms|us)$", "", line).rpartition(" ")[0]) > width
            ):
                wrong.append(f"{width} columns: {line}")
    return wrong


def drawn(view: View, width: int) -> str:
    return to_text(view, io.StringIO(), width=width)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (tmp_path / "mine.yaml").write_text(LAYOUT, encoding="utf-8")
    (tmp_path / "moved.yaml").write_text(MOVED, encoding="utf-8")
    (tmp_path / "rules.yml").write_text(CLEAN, encoding="utf-8")
    (tmp_path / "titan.toml").write_text(
        "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n"
        "context_parallel_degree = 2\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n",
        encoding="utf-8",
    )
    for step, loss in ((4, 1.25), (5, 3.5), (10, 2.75)):
        save(
            tmp_path / "run",
            small_state(),
            step=step,
            keep=Retention(newest=1, every_steps=5, best=1),
            metrics={"loss": loss},
        )
    return tmp_path


COMMANDS = (
    "plan deepseek3-671b --layout ep-as-cp --mesh data=2,fsdp=16,expert=8 --batch 64 --chips h100:32x8",
    "plan deepseek3-671b --layout ep --mesh fsdp=32,expert=8 --batch 256 --chips v5p:8x8x4 --move moe=auto",
    "plan llama3-405b --layout pp --mesh stage=16,fsdp=8 --batch 64 --microbatches 8 --chips h100:16x8",
    "plan mixtral-test --layout fsdp-tp --mesh fsdp=2,tensor=4 --engine torch --precision fp8-current",
    "plan mixtral-test --layout fsdp-tp --mesh fsdp=1,tensor=8",
    "diff ep ep-as-cp --model deepseek3-test --mesh fsdp=2,expert=4 --chips h100:1x8",
    "diff fsdp tp --model llama3-8b --chips h100:1x8",
    "compare ep ep-as-cp:expert=8 fsdp --model deepseek3-671b --chips h100:32x8 --tokens 15T --price 2.5",
    "plan llama3-8b --layout pp --mesh stage=4 --chips h100:8x8 --batch 64 --microbatches 4 --full --tokens 15T --price 2.5",
    "explain deepseek3-671b moe_layers.moe.gate --layout ep-as-cp --mesh fsdp=16,expert=8",
    "search llama3-test --chips h100:1x8 --remat none --microbatches 2 --keep 4",
    "search llama3-405b --chips h100:1x8 --remat full --keep 1",
    "search llama3-test --like fsdp-tp --mesh fsdp=2,tensor=4 --chips h100:1x8 --batch 16",
    *(f"list {names}" for names in LISTS),
    " ".join(LOCKING),
    "check",
    "import maxtext rules.yml --model mixtral-test",
    "import maxtext rules.yml decoder_block=qwen3 steps=100",
    "import torchtitan titan.toml",
    "import huggingface config.json",
    "ckpt show run",
    "ckpt verify run",
)


WRONG = (
    "plan llama3-test --chip h100:8",
    f"plan --{'long' * 30} {'value' * 40}",
    "ckpt show run --bogus",
    "train llama3-test",
    "plan llama3-test --dtype float16",
)
HELPED = ("--help", "ckpt --help", "train --help", "import maxtext --help", "ckpt export huggingface --help")


def test_each_command_prints_every_value_whole(here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    views: list[tuple[str, View]] = []
    doing = ""
    # A module that is imported later would keep what stands in for the function.
    for module in pkgutil.walk_packages(cli.__path__, "shardwright.cli."):
        importlib.import_module(module.name)
    monkeypatch.setattr(output, "write_view", lambda view, _: views.append((doing, view)))
    for module in [module for name, module in sys.modules.items() if name.startswith("shardwright.cli")]:
        if hasattr(module, "write_view"):
            monkeypatch.setattr(module, "write_view", output.write_view)
    from tests.interop.published_folder import made_folder

    folder = made_folder(here / "folder", "llama3-test", {"num_layers": "1"}, shard="500KB").path
    (here / "config.json").write_bytes((folder / "config.json").read_bytes())
    steps = ("ckpt import huggingface folder --out out", "ckpt export huggingface out --out back")
    resharded = "ckpt reshard out --out again --layout fsdp --mesh fsdp=4"
    for doing in (*COMMANDS, *steps, resharded):
        before = len(views)
        assert main(doing.split()) in (0, 1), (doing, capsys.readouterr().err)
        assert len(views) > before or doing.startswith("lock"), doing
        if doing.startswith("lock"):
            (here / "mine.yaml").write_text(MOVED, encoding="utf-8")
    for doing in WRONG:
        assert main(doing.split()) == 2, doing
    for doing in HELPED:
        assert main(doing.split()) == 0, doing
    converted = {
        "directory": "a/b",
        "from": "c/d",
        "form": "one folder",
        "num_tensors": 12_345,
        "num_boxes": 12,
        "bytes": 3,
    }
    views += [
        (
            "an import of a folder",
            converted_view({**converted, "dtypes": ["float32"], "values": ["a"], "left_out": ["b"]}),
        ),
        (
            "an export of a folder",
            converted_view({**converted, "folder": "e", "step": 3, "num_files": 2, "values": []}),
        ),
    ]
    assert [f"{doing}: {fault}" for doing, view in views for fault in faults(view)] == []
    kinds = {getattr(view, "__qualname__", "").partition(".")[0] for _, view in views} | {"compile_view"}
    assert functions_that_draw() <= kinds
    # The layout of an import is a layout file at any width.
    (printed,) = (
        drawn(view, WIDTHS[0]) for doing, view in views if doing.startswith("import maxtext rules.yml --model")
    )
    declared = textwrap.dedent(printed.partition("\nin roles\n")[2].partition("\n\n")[0])
    (here / "pasted.yaml").write_text(declared, encoding="utf-8")
    assert load_layout("pasted.yaml").name == "rules"


def functions_that_draw() -> set[str]:
    return {
        node.name
        for path in REPORT.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "View"
    }


@pytest.mark.parametrize("case", COMPILED_CASES, ids=lambda case: case.name)
def test_a_compiled_program_has_every_value_whole(case) -> None:
    from shardwright.compiled.agreement.agreement import agree

    plan = compiled_plan(case)
    program = case.program(plan)
    view = compile_view(plan, program, agree(plan, program), findings_in(case, case.program), {"--batch": "8"})
    assert faults(view) == []


def test_findings_are_whole() -> None:
    for case in CASES:
        assert faults(lambda width, case=case: findings_list(findings(case), width)) == [], case.name

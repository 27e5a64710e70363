"""`shardwright explain`: the page of each code, also in an installed package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.codes import CODES
from tests.conftest import ROOT


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_its_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code.lower()]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "findings" / f"{code}.md").read_text(encoding="utf-8")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "SW312", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["code"] == "SW312"
    assert value["law"] == CODES["SW312"].law
    assert value["page"].startswith("# SW312: ")


def test_another_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "SW999"]) == 2
    assert capsys.readouterr().err.startswith("shardwright: 'SW999' is no code of a finding. Known: SW101, SW102, ")


def test_a_build_has_the_pages(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run([*command, "--build-lib", str(tmp_path / "lib")], cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "lib" / "shardwright" / "core" / "findings" / "pages"
    assert {page.stem for page in built.iterdir()} == set(CODES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("SW312 --chips h100:8", "SW312 has a page, whatever the plan. Leave the options of a plan out."),
        ("SW312 --layout fsdp --json", "SW312 has a page, whatever the plan."),
        ("SW312 layers.attention.q", "SW312 is the code of a finding, and has no tensors."),
        ("llama3-8b", "llama3-8b is a model: of which tensor?"),
    ],
)
def test_what_a_page_does_not_take(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *line.split()]) == 2
    assert message in capsys.readouterr().err

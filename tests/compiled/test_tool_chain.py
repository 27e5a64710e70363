"""The compiler version that JAX requires, and the finding about another version."""

from __future__ import annotations

import pytest

from shardwright.compiled.findings.tools import wrong_version
from shardwright.compiled.reading import tool_chain
from shardwright.compiled.reading.program import Tool
from shardwright.compiled.reading.tool_chain import is_wanted, pinned_tools


@pytest.mark.parametrize(
    ("version", "wanted", "right"),
    [
        ("0.0.42", "0.0.42.*", True),
        ("0.0.42.1", "0.0.42.*", True),
        ("0.0.421", "0.0.42.*", False),
        ("0.0.51", "0.0.42.*", False),
        ("0.0.17", "0.0.17", True),
        ("0.0.17.1", "0.0.17", False),
    ],
)
def test_versions(version, wanted, right):
    assert is_wanted(Tool(name="libtpu", version=version, wanted=wanted)) == right


def test_the_whole_text():
    tool = Tool(name="libtpu", version="0.0.51", wanted="0.0.42.*")
    assert wrong_version(tool).text() == (
        "error SW313: A program is compiled by the version that JAX requires.\n"
        "  where  package 'libtpu'\n"
        "  found  0.0.51 is installed\n"
        "  needed libtpu==0.0.42.*, which this release of JAX requires: it may not be able to read the programs of other "
        "versions\n"
        "  fix    pip install 'libtpu==0.0.42.*'"
    )


def test_pins_are_read_from_the_metadata_of_jax(monkeypatch):
    monkeypatch.setattr(tool_chain, "requires", lambda _: ["numpy>=2.1", 'libtpu==0.0.42.* ; extra == "tpu"', "six==1"])
    monkeypatch.setattr(tool_chain, "version", {"libtpu": "0.0.42.1", "six": "1"}.__getitem__)
    assert pinned_tools() == (Tool(name="libtpu", version="0.0.42.1", wanted="0.0.42.*"),)


def test_packages_that_are_not_installed_are_left_out():
    assert pinned_tools(["no-such-package"]) == ()
    assert pinned_tools(by="no-such-package") == ()
    # JAX pins nothing of this name.
    assert pinned_tools(["pytest"]) == ()

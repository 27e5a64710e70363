"""Which compilers are installed, and which JAX requires: a newer libtpu cannot print some of its programs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from shardwright.compiled.reading.program import Tool

_PINNED = re.compile(r"(?P<name>[\w.\-]+)\s*==\s*(?P<version>[\w.*]+)\s*(?:;|$)")


def pinned_tools(names: Iterable[str] = ("libtpu",), by: str = "jax") -> tuple[Tool, ...]:
    """The packages that are installed and that ``by`` pins, in any of its extras or without one."""
    try:
        wanted = _pins(requires(by) or ())
    except PackageNotFoundError:
        return ()
    found = []
    for name in names:
        try:
            found.append(Tool(name=name, version=version(name), wanted=wanted[name]))
        except (PackageNotFoundError, KeyError):
            continue
    return tuple(found)


def _pins(requirements: Iterable[str]) -> dict[str, str]:
    """
    >>> _pins(["numpy>=2.1", "libtpu==0.0.42.* ; extra == 'tpu'"])
    {'libtpu': '0.0.42.*'}
    """
    found = (_PINNED.match(requirement) for requirement in requirements)
    return {one["name"]: one["version"] for one in found if one}


def is_wanted(tool: Tool) -> bool:
    """
    >>> is_wanted(Tool(name="libtpu", version="0.0.42.1", wanted="0.0.42.*"))
    True
    >>> is_wanted(Tool(name="libtpu", version="0.0.51", wanted="0.0.42.*"))
    False
    """
    if tool.wanted.endswith(".*"):
        return f"{tool.version}.".startswith(tool.wanted.removesuffix("*"))
    return tool.version == tool.wanted

"""Faults of a layout's text, collected while it is read, and readers of values that can have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.core.findings.codes import CODES
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.position import Located, Position


class Faults:
    """Collects faults, so that one reading reports them all; a value that cannot be read gets a placeholder."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def fault(self, code: str, position: Position, where: str, found: str, needed: str, fix: str = "") -> None:
        self.findings.append(
            Finding(
                code=code,
                severity=CODES[code].severity,
                position=position,
                where=where,
                found=found,
                needed=needed,
                fix=fix,
            )
        )

    def unknown(self, name: str, position: Position, where: str, known: tuple[str, ...], what: str) -> None:
        match = nearest(name, known)
        self.fault(
            "SW111",
            position,
            where,
            f"unknown {what} '{name}'",
            f"one of {', '.join(known)}" if known else f"no {what} at all",
            f"Write '{match}'." if match else "",
        )

    def mapping(self, node: Located, where: str, keys: tuple[str, ...] | None) -> Mapping[str, Located]:
        """The values of a mapping under known keys; under all keys if ``keys`` is None."""
        if not isinstance(node.value, Mapping):
            self.fault("SW120", node.position, where, shown(node.value), "a mapping of names to values")
            return {}
        known = {}
        for key, value in node.value.items():
            if keys is not None and key not in keys:
                self.unknown(key, node.key_position(key), where, keys, "key")
            else:
                known[key] = value
        return known

    def choice(self, values: Mapping[str, Located], key: str, options: tuple[str, ...], default: Any) -> Any:
        """One of the options, or the default if the key is absent."""
        node = values.get(key)
        if node is None:
            return default
        if not (isinstance(node.value, str) and node.value in options):
            self.unknown(shown(node.value, quote=False), node.position, f"'{key}'", options, "value")
        else:
            return node.value
        return default

    def text(self, values: Mapping[str, Located], key: str, where: str) -> str | None:
        node = values.get(key)
        if node is None or isinstance(node.value, str):
            return None if node is None else str(node.value)
        self.fault("SW120", node.position, where, f"{key} {shown(node.value)}", "a text", f"Write {key}: '...'.")
        return None


def shown(value: object, *, quote: bool = True) -> str:
    """A value approximately as the user wrote it, for a message."""
    if isinstance(value, str):
        return f"'{value}'" if quote else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, tuple) else str(value)

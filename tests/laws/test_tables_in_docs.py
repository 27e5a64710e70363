"""The tables in the docs are those that the code reads."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

from shardwright.core.engines.engines import ENGINES
from shardwright.core.engines.properties import EngineProperties, Lack
from shardwright.core.layout.roles import COMPONENTS, LOGICAL_AXES, ROLES
from shardwright.core.model.precision import PRECISION
from shardwright.training.optimizers import OPTIMIZERS, optimizer_of
from tests.conftest import ROOT


def rows_of(document: str, header: str) -> list[list[str]]:
    """The cells of the table under a header line, code marks taken off."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    body = text.split(header, 1)[1].split("\n\n", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s-]+", line)]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_role_table() -> None:
    shown = rows_of("rules.md", "| role | activations: shards | weights at rest: shards | stores | where |")
    assert shown == [
        [
            role.name,
            ", ".join(role.activations) or "nothing",
            ", ".join(role.weights) or ("the storage dim" if role.stores else "nothing"),
            "yes" if role.stores else "no",
            "everywhere" if role.components == COMPONENTS else ", ".join(role.components),
        ]
        for role in ROLES.values()
    ]


def test_the_logical_axes() -> None:
    assert rows_of("notation.md", "| logical axis | what it counts |") == [list(item) for item in LOGICAL_AXES.items()]


def test_the_components() -> None:
    assert [row[0] for row in rows_of("layouts.md", "| component | what it is |")] == list(COMPONENTS)


def test_the_optimizers() -> None:
    shown = rows_of("optimizers.md", "| name | constants | update u | kept as | source |")
    for name, constants, _, kept, source in shown:
        optimizer = optimizer_of(name, {})
        assert f"{name} {constants}" == optimizer.text
        assert re.findall(r"[a-z]+\.?/?[a-z]+(?= [a-z](?:,|$))", kept) == [
            one.prefix.rstrip("/") for one in optimizer.kept
        ]
        assert source == OPTIMIZERS[name].source
    assert [row[0] for row in shown] == sorted(OPTIMIZERS)


def test_the_dtypes() -> None:
    shown = rows_of("precision.md", "| | what | computed | kept | sent | summed |")
    assert shown == [
        [name, row.what, *(word or "-" for word in (row.computed, row.kept, row.sent, row.summed))]
        for name, row in PRECISION.items()
    ]


def test_the_properties_of_engines() -> None:
    def shown(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else ", ".join(value) or "none"  # type: ignore[arg-type]

    rows = rows_of("engines.md", "| property | what it says | JAX | PyTorch | read in |")
    assert [row[0] for row in rows] == [one.name for one in fields(EngineProperties) if one.name != "lacks"]
    for name, _, *values, read_in in rows:
        expected = [getattr(engine, name) for engine in ENGINES.values()]
        assert values == [shown(sorted(one) if isinstance(one, frozenset) else one) for one in expected]
        for file in read_in.split(", "):
            assert f".{name}" in (ROOT / "src/shardwright" / file).read_text(encoding="utf-8"), (name, file)


def test_what_engines_lack() -> None:
    rows = rows_of("engines.md", "| word | what it is | JAX | PyTorch |")
    assert [[row[0], *row[2:]] for row in rows] == [
        [lack, *("lacks it" if lack in engine.lacks else "-" for engine in ENGINES.values())] for lack in get_args(Lack)
    ]

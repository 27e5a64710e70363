"""The rooms of each layer import one way, are small, and are drawn in ARCHITECTURE.md; and a violation would be detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.layers import PACKAGE, modules
from tests.laws.rooms import MOST_FILES, ROOMS, backwards, crowded, cycles, drawn, unlisted, without_a_place

FOLDER = ROOT / "src" / PACKAGE
SOURCES = modules(ROOT / "src")


def test_the_rooms_hold() -> None:
    wrong = [*crowded(FOLDER), *unlisted(FOLDER), *without_a_place(SOURCES), *backwards(SOURCES), *cycles(SOURCES)]
    assert not wrong, "\n".join(wrong)


def test_the_tree_is_drawn_as_it_is() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert f"```text\n{drawn(FOLDER)}```\n" in text, f"ARCHITECTURE.md lacks this tree:\n{drawn(FOLDER)}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two rooms of a layer, of which the second imports the first."""
    texts = {
        "core/__init__.py": '"""The core."""\n',
        "core/mesh/__init__.py": '"""The mesh.\n\nspec.py  a spec\n"""\n',
        "core/mesh/spec.py": '"""A spec."""\n',
        "core/layout/__init__.py": '"""Layouts.\n\nroles.py  roles\n"""\n',
        "core/layout/roles.py": '"""Roles."""\nfrom shardwright.core.mesh.spec import Spec\n',
    }
    for name, text in texts.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / PACKAGE


TWO = {"core": ("mesh", "layout", "")}


def test_an_order_that_holds_is_left_alone(package: Path) -> None:
    found = modules(package.parent)
    assert [
        *crowded(package),
        *unlisted(package),
        *without_a_place(found, TWO),
        *backwards(found, TWO),
        *cycles(found),
    ] == []


def test_an_import_backwards_is_noticed(package: Path) -> None:
    (package / "core" / "mesh" / "spec.py").write_text("from shardwright.core.layout import roles\n")
    found = modules(package.parent)
    assert backwards(found, TWO) == [
        "shardwright.core.mesh.spec: 'mesh' is before 'layout' and may not import shardwright.core.layout.roles"
    ]
    assert cycles(found) == ["shardwright.core.layout.roles -> shardwright.core.mesh.spec"]


def test_a_room_without_a_place_is_noticed(package: Path) -> None:
    found = modules(package.parent)
    assert without_a_place(found, {"core": ("mesh", "")}) == ["core: room 'layout' is not in the table"]
    assert without_a_place(found, {"core": ("mesh", "layout", "plan", "")}) == ["core: room 'plan' is gone"]


def test_a_crowded_room_is_noticed(package: Path) -> None:
    for number in range(MOST_FILES):
        (package / "core" / "mesh" / f"file_{number}.py").touch()
    assert crowded(package) == [f"core/mesh has {MOST_FILES + 2} files, {MOST_FILES} at most: look for the rooms in it"]


def test_a_file_that_a_room_does_not_list_is_noticed(package: Path) -> None:
    (package / "core" / "mesh" / "spec.py").rename(package / "core" / "mesh" / "hops.py")
    assert unlisted(package) == [
        "core/mesh does not say what hops.py is",
        "core/mesh says what spec.py is, which is not there",
    ]


def test_every_layer_with_rooms_has_an_order() -> None:
    assert all(order.count(room) == 1 for order in ROOMS.values() for room in order)


def test_the_drawing_has_folders_and_their_docstrings(package: Path) -> None:
    assert drawn(package) == "core/      The core.\n  layout/  Layouts.\n  mesh/    The mesh.\n"

"""The import table holds for every source file, and a violation would be detected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.layers import AT_CALL_TIME, FRONT, LAYERS, PACKAGE, STANDARD_LIBRARY_ONLY, layer_of, modules, violations

FOLDER = ROOT / "src" / PACKAGE
SOURCES = modules(ROOT / "src")
FRAMEWORKS = {"jax", "jaxlib", "torch", "numpy", "optax", "grain", "tokenizers", "safetensors", "transformers"}


def test_every_import_is_in_the_table() -> None:
    wrong = [
        line
        for module, path in SOURCES.items()
        for line in violations(module, path.read_text(encoding="utf-8"), is_package=path.stem == "__init__")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in FOLDER.iterdir() if any(path.glob("**/*.py"))}
    assert folders <= set(LAYERS), f"not in the table: {sorted(folders - set(LAYERS))}"


def test_layers_are_in_an_order() -> None:
    """No layer imports itself through others. Engines are imported only inside functions, and never by each other."""
    for layer in LAYERS:
        reached, frontier = set(), {layer}
        while frontier:
            frontier = {lower for upper in frontier for lower in LAYERS.get(upper, ())} & set(LAYERS) - reached
            reached |= frontier
        assert layer not in reached
    assert not {"engine_jax", "engine_torch"} & set().union(*LAYERS.values())
    for layer, engines in AT_CALL_TIME.items():
        assert layer in ("report", "cli", FRONT) or not {"engine_jax", "engine_torch"} & engines


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("shardwright.core.mesh.mesh", "import numpy", "numpy"),
        ("shardwright.core.mesh.mesh", "import os, jax.numpy as jnp", "jax.numpy"),
        ("shardwright.core.mesh.mesh", "from torch import nn", "torch"),
        ("shardwright.core.mesh.mesh", "def lazy():\n    import yaml", "yaml"),
        ("shardwright.core.mesh.mesh", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax", "jax"),
        ("shardwright.core.mesh.mesh", "try:\n    import numpy\nexcept ImportError:\n    pass", "numpy"),
        ("shardwright.core.mesh.mesh", "from shardwright.files import read_yaml", "shardwright.files"),
        ("shardwright.core.mesh.mesh", "from shardwright import cost", "shardwright.cost"),
        ("shardwright.core.mesh.mesh", "from ...files import read_yaml", "shardwright.files"),
        ("shardwright.core.mesh.mesh", "from ... import files", "shardwright.files"),
        ("shardwright.core.mesh.mesh", "import importlib\nimportlib.import_module('jax')", "jax"),
        ("shardwright.core.mesh.mesh", "__import__('jax')", "jax"),
        ("shardwright.core.mesh.mesh", "import importlib\nimportlib.import_module(name)", "computed name"),
        ("shardwright.engine_jax.training.step", "import importlib\nimportlib.import_module(name)", "computed name"),
        # The layer that predicts a program does not read one.
        (
            "shardwright.core.plan.collectives",
            "from shardwright.compiled.reading.read import read",
            "shardwright.compiled.reading.read",
        ),
        ("shardwright.cost.steps.step", "from shardwright.compiled import rewrites", "shardwright.compiled"),
        ("shardwright.init.values", "import jax", "jax"),
        ("shardwright.engine_jax.training.step", "import torch", "torch"),
        (
            "shardwright.engine_jax.training.step",
            "from shardwright.engine_torch import step",
            "shardwright.engine_torch",
        ),
        ("shardwright.engine_jax.training.step", "from shardwright.cli import main", "shardwright.cli"),
        ("shardwright.runs.metrics.journal", "import tensorboardX", "tensorboardX"),
        ("shardwright.runs.loop", "def go():\n    import jax", "jax"),
        ("shardwright.runs.run", "from shardwright.engine_jax import run", "shardwright.engine_jax"),
        ("shardwright.cli.main", "import shardwright.engine_jax.training.step", "shardwright.engine_jax"),
        ("shardwright.cli.main", "def run():\n    import jax", "jax"),
        ("shardwright", "from shardwright.engine_jax import step", "shardwright.engine_jax"),
    ],
)
def test_the_table_can_be_broken(module: str, source: str, named: str) -> None:
    assert len(violations(module, source)) == 1
    assert named in violations(module, source)[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwright.core.mesh.mesh", "import os.path\nfrom . import spec\nfrom shardwright.core import box"),
        ("shardwright.files.yaml_text", "import yaml\nfrom shardwright.core.findings.errors import InputError"),
        ("shardwright.runs.metrics.journal", "def curves():\n    import tensorboardX"),
        ("shardwright.cli.main", "def train():\n    from shardwright.engine_jax import loop"),
        ("shardwright.cli.main", "import importlib\ndef train(e):\n    importlib.import_module(f'shardwright.{e}')"),
    ],
)
def test_what_the_table_permits(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_relative_imports_of_a_package_start_from_itself() -> None:
    assert violations("shardwright.core", "from . import mesh", is_package=True) == []
    assert len(violations("shardwright.core", "from ... import files", is_package=True)) == 1


def loaded_by(names: list[str], *paths: Path, through_front_door: bool = True) -> set[str]:
    """The top-level packages, beyond the standard library, that importing ``names`` loads in a fresh interpreter."""
    closed = f"sys.modules[{PACKAGE!r}] = door = types.ModuleType({PACKAGE!r})\ndoor.__path__ = [{str(FOLDER)!r}]\n"
    program = (
        f"import importlib, sys, types\nsys.path[:0] = {[str(path) for path in paths]!r}\n"
        f"{'' if through_front_door else closed}before = set(sys.modules)\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_core_loads_the_standard_library_only() -> None:
    names = [module for module in SOURCES if layer_of(module) in STANDARD_LIBRARY_ONLY]
    assert "shardwright.core.mesh.mesh" in names
    # The package's own ``__init__`` loads more than the core, and would be run first.
    assert loaded_by(names, through_front_door=False) == {PACKAGE}


@pytest.mark.parametrize("name", [PACKAGE, f"{PACKAGE}.cli.main"])
def test_the_front_door_and_the_command_line_load_no_framework(name: str) -> None:
    assert not loaded_by([name]) & FRAMEWORKS


def test_what_surrounds_a_run_loads_no_engine_s_framework() -> None:
    names = [module for module in SOURCES if layer_of(module) == "runs"]
    assert "shardwright.runs.loop" in names
    assert not loaded_by(names) & {"jax", "jaxlib", "torch", "optax"}


@pytest.mark.parametrize("through_front_door", [True, False])
def test_a_framework_that_is_loaded_is_noticed(tmp_path: Path, through_front_door: bool) -> None:
    (tmp_path / "sly.py").write_text("import shardwright.core.mesh.mesh\n__import__('num' + 'py')\n")
    loaded = loaded_by(["sly"], tmp_path, through_front_door=through_front_door)
    assert {"sly", PACKAGE, "numpy"} <= loaded
    assert loaded & FRAMEWORKS == {"numpy"}

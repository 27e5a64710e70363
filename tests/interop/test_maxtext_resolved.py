"""Each weight's spec compared with the one that MaxText resolves: every preset, five models, and settings that rename dims."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from flax.linen import logical_to_mesh_axes

from shardwright import FindingsError
from shardwright.interop.maxtext.export import export_maxtext
from shardwright.interop.maxtext.importing import placed_for
from shardwright.interop.maxtext.resolution.placement import Placed
from shardwright.interop.maxtext.sources import MaxTextRequest
from shardwright.layouts import preset_names
from tests.interop.maxtext_facts import DIMS_OF_LAYERS, FACTS, specs_of, write_configs
from tests.interop.test_maxtext_export import CONFLICTING, planned

UNREAD = [
    "run_name=mine",
    "steps=10",
    "dataset_type=synthetic",
    "base_output_directory=gs://bucket/a: b",
    "attention=flash",
]

CHANGES_NO_LAYOUT = {
    *(each.partition("=")[0] for each in UNREAD),
    "scan_layers_per_stage",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configs(tmp_path_factory.mktemp("maxtext") / "configs")


def in_maxtexts_names(placed: Placed) -> tuple[list[str], set[str]]:
    """All dims except layers, as MaxText names and shards them; and the axes of layers."""
    words, layers = [], set()
    for dim, name, axes_of_dim in zip(placed.tensor.dims, placed.tensor.names, placed.dim_axes, strict=True):
        if dim == "layers":
            layers = set(axes_of_dim)
        else:
            words.append("/".join((name or "_", *axes_of_dim)))
    return words, layers


def as_maxtext_has_it(spec: str) -> tuple[list[str], set[str]]:
    """The same for a recorded spec, in which the dims of layers may be at any place."""
    words, layers = [], set()
    for word in spec.split():
        name, *axes_of_dim = word.split("/")
        if name in DIMS_OF_LAYERS:
            layers |= set(axes_of_dim)
        else:
            words.append(word)
    return words, layers


@pytest.mark.parametrize("case", FACTS["cases"])
def test_each_weight_is_sharded_as_in_maxtext(case: str, configs: Path) -> None:
    facts = FACTS["cases"][case]
    given = (*facts["given"], *UNREAD)
    imported, sizes, _ = placed_for(
        MaxTextRequest(file=str(configs / "base.yml"), given=given, devices=64, batch=64, length=64)
    )
    assert not sizes
    keys = [each.partition("=")[0] for each in given]
    assert list(imported.configuration.not_read) == [key for key in keys if key in CHANGES_NO_LAYOUT]
    ours = {placed.tensor.name: in_maxtexts_names(placed) for placed in imported.weights}
    theirs = {weight: as_maxtext_has_it(spec) for weight, spec in specs_of(case).items()}
    assert ours == theirs


def test_the_facts_are_of_five_presets_and_five_models_at_least() -> None:
    pairs = {tuple(case.split(" | ")) for case in FACTS["cases"]}
    models = {"llama2-7b", "llama3-8b", "mixtral-8x7b", "deepseek2-16b", "deepseek3-671b"}
    assert {(model, preset) for model in models for preset in ("default", *FACTS["presets"])} <= pairs
    assert sum(len(case["weights"]) for case in FACTS["cases"].values()) > 1000


LARGE = {"llama3-test": "llama3-8b", "mixtral-test": "mixtral-8x7b", "deepseek3-test": "deepseek3-671b"}
"""Our small models, and the MaxText models with the same weights except for sizes."""


@pytest.mark.parametrize("model", LARGE)
def test_exported_rules_shard_maxtexts_own_names_as_the_plan_does(model: str) -> None:
    """The names are MaxText's and the resolution is Flax's: the exporter's own table is not used."""
    specs = specs_of(f"{LARGE[model]} | default")
    for layout in preset_names():
        if layout == "pp" or (layout, model) in CONFLICTING:
            continue
        plan = planned(layout, model)
        rules = tuple((line.name, line.axes) for line in export_maxtext(plan).rules)
        for row in plan.weights:
            names = [word.split("/")[0] for word in specs[row.name].split() if word.split("/")[0] not in DIMS_OF_LAYERS]
            spec = logical_to_mesh_axes(tuple(None if name == "_" else name for name in names), rules) or ()
            shardings = [
                (axes_of_dim,) if isinstance(axes_of_dim, str) else tuple(axes_of_dim or ()) for axes_of_dim in spec
            ]
            at_rest = [dim.axes for dim in row.spec.dims if dim.logical_axis != "layers"]
            assert shardings == at_rest, (layout, row.name)


def test_random_rules_resolve_as_flax_does_on_maxtexts_names(configs: Path) -> None:
    """Random rules on the command line of a model; axes of size 1 still conflict."""
    rng = random.Random(11)
    axes = ["data", "fsdp", "fsdp_transpose", "context", "tensor", "expert"]
    for model in ("mixtral-8x7b", "deepseek2-16b"):
        annotated = specs_of(f"{model} | default")
        for _ in range(8):
            names = sorted({w.split("/")[0] for s in annotated.values() for w in s.split()} - {"_"})
            rules = [[name, rng.sample(axes, rng.randrange(4))] for name in rng.choices(names, k=40)]
            sizes = {axis: rng.choice((1, 2)) for axis in axes}
            text = ", ".join(f"[{name}, [{', '.join(axes_of_dim)}]]" for name, axes_of_dim in rules)
            try:
                imported, _, _ = placed_for(
                    MaxTextRequest(
                        file=str(configs / "base.yml"),
                        given=(
                            f"model_name={model}",
                            "override_logical_axis_rules=true",
                            f"logical_axis_rules=[{text}]",
                        ),
                        mesh_sizes=sizes,
                        batch=64,
                        length=64,
                    )
                )
            except FindingsError as error:
                pytest.fail(str(error))
            for placed in imported.weights:
                own = [word.split("/")[0] for word in annotated[placed.tensor.name].split()]
                spec = logical_to_mesh_axes(
                    tuple(None if name == "_" else name for name in own), tuple((n, tuple(c)) for n, c in rules)
                )
                shardings = {
                    name: tuple(
                        a
                        for a in ((axes_of_dim,) if isinstance(axes_of_dim, str) else axes_of_dim or ())
                        if sizes[a] > 1
                    )
                    for name, axes_of_dim in zip(own, spec or (), strict=True)
                    if name != "_"
                }
                found = {n: c for n, c in zip(placed.tensor.names, placed.dim_axes, strict=True) if n is not None}
                assert found == shardings, placed.tensor.name

"""Each weight's spec beside the one that MaxText itself resolves: every preset, five models, and settings that rename dims."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from flax.linen import logical_to_mesh_axes

from shardwright import FindingsError
from shardwright.interop.maxtext.export import export_maxtext
from shardwright.interop.maxtext.importing import placed_for
from shardwright.interop.maxtext.resolution.placing import Placed
from shardwright.interop.maxtext.sources import MaxTextRequest
from shardwright.layouts import preset_names
from tests.interop.maxtext_facts import DIMS_OF_LAYERS, FACTS, specs_of, write_configs
from tests.interop.test_maxtext_export import TORN, planned

UNREAD = [
    "run_name=mine",
    "steps=10",
    "dataset_type=synthetic",
    "base_output_directory=gs://bucket/a: b",
    "attention=flash",
]

CHANGES_NO_LAYOUT = {
    *(each.partition("=")[0] for each in UNREAD),
    "num_layers_per_pipeline_stage",
    "scan_layers_per_stage",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configs(tmp_path_factory.mktemp("maxtext") / "configs")


def in_maxtexts_words(placed: Placed) -> tuple[list[str], set[str]]:
    """The words of all dims but the layers', as MaxText names and cuts them; and the axes of the layers."""
    words, layers = [], set()
    for dim, name, cut in zip(placed.tensor.dims, placed.tensor.names, placed.cuts, strict=True):
        if dim == "layers":
            layers = set(cut)
        else:
            words.append("/".join((name or "_", *cut)))
    return words, layers


def as_maxtext_has_it(spec: str) -> tuple[list[str], set[str]]:
    """The same of a spec of the facts, whose dims of layers may stand anywhere."""
    words, layers = [], set()
    for word in spec.split():
        name, *cut = word.split("/")
        if name in DIMS_OF_LAYERS:
            layers |= set(cut)
        else:
            words.append(word)
    return words, layers


@pytest.mark.parametrize("case", FACTS["cases"])
def test_each_weight_rests_where_maxtext_puts_it(case: str, configs: Path) -> None:
    facts = FACTS["cases"][case]
    given = (*facts["given"], *UNREAD)
    imported, sizes, _ = placed_for(
        MaxTextRequest(file=str(configs / "base.yml"), given=given, devices=64, batch=64, length=64)
    )
    assert not sizes
    keys = [each.partition("=")[0] for each in given]
    assert list(imported.configuration.not_read) == [key for key in keys if key in CHANGES_NO_LAYOUT]
    ours = {placed.tensor.name: in_maxtexts_words(placed) for placed in imported.weights}
    theirs = {weight: as_maxtext_has_it(spec) for weight, spec in specs_of(case).items()}
    assert ours == theirs


def test_the_facts_are_of_five_presets_and_five_models_at_least() -> None:
    pairs = {tuple(case.split(" | ")) for case in FACTS["cases"]}
    models = {"llama2-7b", "llama3-8b", "mixtral-8x7b", "deepseek2-16b", "deepseek3-671b"}
    assert {(model, preset) for model in models for preset in ("default", *FACTS["presets"])} <= pairs
    assert sum(len(case["weights"]) for case in FACTS["cases"].values()) > 1000


LARGE = {"llama3-test": "llama3-8b", "mixtral-test": "mixtral-8x7b", "deepseek3-test": "deepseek3-671b"}
"""Small models of ours, and the models of MaxText's that have the same weights but for their sizes."""


@pytest.mark.parametrize("model", LARGE)
def test_exported_rules_cut_maxtexts_own_names_as_the_plan_does(model: str) -> None:
    """The names are MaxText's, the resolution is Flax's: nothing of the exporter's table is in between."""
    specs = specs_of(f"{LARGE[model]} | default")
    for layout in preset_names():
        if layout == "pp" or (layout, model) in TORN:
            continue
        plan = planned(layout, model)
        rules = tuple((line.name, line.axes) for line in export_maxtext(plan).rules)
        for row in plan.weights:
            names = [word.split("/")[0] for word in specs[row.name].split() if word.split("/")[0] not in DIMS_OF_LAYERS]
            spec = logical_to_mesh_axes(tuple(None if name == "_" else name for name in names), rules) or ()
            cuts = [(cut,) if isinstance(cut, str) else tuple(cut or ()) for cut in spec]
            rests = [dim.axes for dim in row.spec.dims if dim.logical_axis != "layers"]
            assert cuts == rests, (layout, row.name)


def test_random_rules_resolve_as_flax_does_on_maxtexts_names(configs: Path) -> None:
    """Rules that nobody wrote, given on the command line of a model; axes of size 1 stay in the way."""
    chance = random.Random(11)
    axes = ["data", "fsdp", "fsdp_transpose", "context", "tensor", "expert"]
    for model in ("mixtral-8x7b", "deepseek2-16b"):
        tagged = specs_of(f"{model} | default")
        for _ in range(8):
            names = sorted({w.split("/")[0] for s in tagged.values() for w in s.split()} - {"_"})
            rules = [[name, chance.sample(axes, chance.randrange(4))] for name in chance.choices(names, k=40)]
            sizes = {axis: chance.choice((1, 2)) for axis in axes}
            text = ", ".join(f"[{name}, [{', '.join(cut)}]]" for name, cut in rules)
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
                own = [word.split("/")[0] for word in tagged[placed.tensor.name].split()]
                spec = logical_to_mesh_axes(
                    tuple(None if name == "_" else name for name in own), tuple((n, tuple(c)) for n, c in rules)
                )
                cuts = {
                    name: tuple(a for a in ((cut,) if isinstance(cut, str) else cut or ()) if sizes[a] > 1)
                    for name, cut in zip(own, spec or (), strict=True)
                    if name != "_"
                }
                found = {n: c for n, c in zip(placed.tensor.names, placed.cuts, strict=True) if n is not None}
                assert found == cuts, placed.tensor.name

"""Names and shapes of the full sizes: those that transformers builds on the meta device, and DeepSeek-V3 as it is published."""

from __future__ import annotations

import json
import re
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights.importing import FittedFolder, fitted
from shardwright.interop.hugging_face.weights.mapping import published_tensors
from shardwright.interop.hugging_face.weights.model import model_of_folder
from shardwright.models import build, names
from tests.matrix import some
from tests.models.published import model_class, published_config

Shapes = dict[str, tuple[int, ...]]


@cache
def theirs(model: str) -> tuple[Shapes, list[WeightRenaming], list[WeightConverter]]:
    """The tensors of a model of transformers, and how it renames and joins published ones."""
    config = published_config(build(model).architecture)
    with torch.device("meta"):
        made = model_class(config)(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    steps = get_model_conversion_mapping(made, add_legacy=False)
    return (
        shapes,
        [step for step in steps if isinstance(step, WeightRenaming)],
        [step for step in steps if isinstance(step, WeightConverter)],
    )


@pytest.mark.parametrize("model", some(names(), (1, 2, 6, 9, 10)))
def test_names_and_shapes_are_those_of_transformers(model: str) -> None:
    shapes, renamings, converters = theirs(model)
    table = build(model)
    assert {tensor.name: tensor.shape for tensor in published_tensors(table, "stacked")} == shapes
    # One by one they are joined to the same tensors, with the same number of elements.
    sizes = dict.fromkeys(shapes, 0)
    for tensor in published_tensors(table, "each"):
        name, _ = rename_source_key(tensor.name, renamings, converters)
        sizes[name] += prod(tensor.shape)
    assert sizes == {name: prod(shape) for name, shape in shapes.items()}


HIDDEN, VOCABULARY, LAST = 7168, 129_280, "model.layers.61"
PREDICTION = {
    f"{LAST}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    f"{LAST}.enorm.weight": (HIDDEN,),
    f"{LAST}.hnorm.weight": (HIDDEN,),
    f"{LAST}.embed_tokens.weight": (VOCABULARY, HIDDEN),
    f"{LAST}.shared_head.norm.weight": (HIDDEN,),
    f"{LAST}.shared_head.head.weight": (VOCABULARY, HIDDEN),
}
"""What DeepSeek-V3's layer 61 has in addition to what layer 60 has. None of it is FP8."""

MATRIX = re.compile(r"(?<!eh)_proj(_with_mqa)?\.weight$")
PUBLISHED_BYTES, PUBLISHED_FILES = 688_586_727_753, 163
"""Of the repository deepseek-ai/DeepSeek-V3, commit afb92e1: 163 safetensors files with their headers."""


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 as it is published: configuration, index and headers; the elements are holes in the files."""
    folder = tmp_path_factory.mktemp("full") / "DeepSeek-V3"
    folder.mkdir()
    shapes = {tensor.name: tensor.shape for tensor in published_tensors(build("deepseek3-671b"), "each")}
    of_last = {
        name.replace("layers.60.", "layers.61."): shape for name, shape in shapes.items() if "layers.60." in name
    }
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, shape in (shapes | of_last | PREDICTION).items():
        if MATRIX.search(name):
            tensors[name] = "F8_E4M3", shape, prod(shape)
            blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
            tensors[f"{name}_scale_inv"] = "F32", blocks, 4 * prod(blocks)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = "F32", shape, 4 * prod(shape)
        else:
            tensors[name] = "BF16", shape, 2 * prod(shape)
    weight_map: dict[str, str] = {}
    for number in range(PUBLISHED_FILES):
        header, end = {}, 0
        for name, (dtype, shape, num_bytes) in [*tensors.items()][number::PUBLISHED_FILES]:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
            end += num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        path = folder / f"model-{number + 1:05d}-of-{PUBLISHED_FILES:06d}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(header, path.name)
    index = {"metadata": {"total_size": sum(num for _, _, num in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        **published_config(build("deepseek3-671b").architecture).to_dict(),
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path, *, keeps_prediction: bool = False) -> FittedFolder:
    return fitted(folder, lambda one: model_of_folder(one, None, {}), keeps_prediction=keeps_prediction)


def test_deepseek_v3_as_it_is_published(deepseek: Path) -> None:
    files = list(deepseek.glob("*.safetensors"))
    # The published files differ from these only in where tensors are, so in digits of their headers.
    assert abs(sum(path.stat().st_size for path in files) - PUBLISHED_BYTES) < 2_000_000
    found = opened(deepseek)
    assert (found.model.name, found.experts) == ("deepseek3-671b", "each")
    assert len(found.needed) == 45_395
    assert len(found.folder.tensors) == 45_395 + 788
    assert len(found.folder.scales) == 45_032 + 776
    (left_out,) = found.fit.left_out
    assert len(left_out.names) == 788
    kept = opened(deepseek, keeps_prediction=True).fit
    assert (kept.left_out, set(kept.kept)) == ((), set(left_out.names))


def test_scales_of_other_blocks_are_named(deepseek: Path) -> None:
    path = deepseek / "config.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "quantization_config": {"weight_block_size": [128, 64]}}))
    try:
        with pytest.raises(InputError) as error:
            opened(deepseek)
    finally:
        path.write_text(before)
    lines = str(error.value).splitlines()
    assert lines[1].endswith(
        "_scale_inv': shape: found (16, 56), needed (16, 112): one for each block of 128 x 64 of (2048, 7168)"
    )
    assert lines[-1] == "  ... and 45,012 more"

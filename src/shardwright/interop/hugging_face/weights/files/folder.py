"""A model folder of Hugging Face: its configuration, its safetensors files, and every tensor in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.format.fields import parse_json
from shardwright.core.findings.bounds import is_file_name, within
from shardwright.core.findings.errors import InputError
from shardwright.files.text import read_text
from shardwright.interop.hugging_face.published import Published, read_config
from shardwright.interop.hugging_face.weights.files.quantized import (
    VALUES_AS,
    Scales,
    block_of,
    is_quantized,
    parted,
    read_scales,
)
from shardwright.interop.hugging_face.weights.files.safetensors_file import FoundTensor, read_header

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A model folder. ``config`` is None where it has no config.json. No element is read yet.

    ``tensors``: all but the scales of FP8, which are in ``scales`` by the name of their tensor. ``block``: how many rows and
    columns have one scale; None without scales.
    """

    path: Path
    config: Published | None
    tensors: Mapping[str, FoundTensor]
    scales: Mapping[str, FoundTensor]
    block: tuple[int, int] | None

    def dtype(self, name: str) -> str:
        """The dtype of a tensor's values, unless another is asked for."""
        tensor = self.tensors[name]
        return VALUES_AS if is_quantized(tensor) else tensor.known.name

    def scales_of(self, name: str) -> Scales | None:
        """The scales of a tensor, read; None for a tensor that is not FP8."""
        tensor = self.tensors[name]
        if not is_quantized(tensor):
            return None
        assert self.block is not None, name
        return read_scales(tensor, self.scales[name], self.block)


def open_folder(path: Path) -> Folder:
    """Reads configuration, index and headers. Raises InputError for a folder that is not complete."""
    if path.is_file():
        raise InputError(f"{path}: it is a file. Give its folder, with {CONFIG} and {SINGLE} or {INDEX}.")
    if not path.is_dir():
        raise InputError(f"{path}: no such folder. Give a folder with {CONFIG} and {SINGLE} or {INDEX}.")
    config = read_config(str(path / CONFIG)) if (path / CONFIG).is_file() else None
    single, index = (path / SINGLE).exists(), (path / INDEX).exists()
    if single and index:
        raise InputError(f"{path}: it has {SINGLE} and {INDEX}, and they may differ. Move one of them away.")
    if not single and not index:
        raise InputError(f"{path}: there is no {SINGLE} and no {INDEX}.{_instead(path)}")
    tensors, scales = parted(read_header(path / SINGLE) if single else _by_index(path))
    block = None
    if scales or any(is_quantized(tensor) for tensor in tensors.values()):
        if config is None:
            raise InputError(
                f"{path}: its weights are FP8, and there is no {CONFIG}, which says what has one scale. Add it."
            )
        block = block_of(config)
    return Folder(path=path, config=config, tensors=tensors, scales=scales, block=block)


def _instead(path: Path) -> str:
    """What a folder has in place of weights under the usual names."""
    if (others := sorted(path.glob("*.safetensors"))) and len(others) > 1:
        return f" Of {len(others):,} files, as {others[0].name}, the index says what each has: fetch it too."
    if others:
        return f" Rename {others[0].name}, if it has all weights."
    pickled = next(iter(sorted(path.glob("*.bin"))), None)
    return "" if pickled is None else f" {pickled.name} is pickled, and is never read: save it as safetensors first."


def _by_index(folder: Path) -> dict[str, FoundTensor]:
    """The tensors of all files that an index names. Raises InputError where the index and a header disagree."""
    top = parse_json(read_text(folder / INDEX).encode(), folder / INDEX)
    listed: dict[str, dict[str, None]] = {}
    within(f"{folder / INDEX}: the number of its tensors", len((weight_map := top["weight_map"]).mapping()), "tensors")
    for name in weight_map.mapping():
        file = weight_map[name].text()
        if not is_file_name(file) or not file.endswith(".safetensors"):
            raise weight_map[name].error(f"'{file}' is not the name of a .safetensors file next to the index.")
        listed.setdefault(file, {})[name] = None
    found: dict[str, FoundTensor] = {}
    for file, names in listed.items():
        held = read_header(folder / file)
        for name in names:
            if name not in held:
                raise InputError(f"{folder / INDEX}: '{name}' should be in {file}, and is not. Fetch both again.")
        for name in held:
            if name not in names:
                raise InputError(
                    f"{folder / file}: it holds '{name}', which {INDEX} does not place there. Fetch both again."
                )
        found |= held
    return found

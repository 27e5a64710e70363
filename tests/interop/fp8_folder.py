"""Folders whose matrices are FP8 with a scale for each block, and their values by torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MATRIX = re.compile(r"_proj(_with_mqa)?\.weight")
"""The names of tensors that are published in FP8: all matrices but embedding, router and output head."""


def expanded(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """A scale for each element of a matrix."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def scales_of(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, as 448."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.abs().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return blocks.amax((1, 3)).clamp(min=1e-12) / 448


def quantize_folder(folder: Path, block: tuple[int, int] = (128, 128)) -> dict[str, torch.Tensor]:
    """Rewrites a folder with FP8 matrices. Returns the values of all its tensors, in float32 where they were matrices."""
    values: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            held[name] = values[name] = tensor
            if MATRIX.search(name):
                scales = scales_of(tensor, block)
                spread = expanded(scales, tensor.shape, block)
                held[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
                held[f"{name}_scale_inv"] = scales
                values[name] = held[name].to(torch.float32) * spread
        save_file(held, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return values
